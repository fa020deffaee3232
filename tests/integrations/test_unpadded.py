"""`enable(model, unpad=True)`: encoders compute on real tokens alone, with the outputs of the padded batch."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters as dynamo_counters
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
)

import stof
from stof import masks
from stof.errors import ArgumentError, ShapeError, UnsupportedError
from stof.integrations.torch.cuda_graphs import MOST_RECORDED
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

from stof.integrations.transformers import unpadded  # noqa: E402

SIZES = {
    "vocab_size": models.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def _roberta() -> Any:
    return RobertaModel(RobertaConfig(**SIZES, pad_token_id=1)).eval()


def _modernbert() -> Any:
    sizes = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    special = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}
    layers = {"local_attention": 6, "global_attn_every_n_layers": 2}
    return ModernBertModel(ModernBertConfig(**sizes, **special, **layers)).eval()


def _inputs(side: str = "right", lengths: tuple[int, ...] = (5, 16, 12)) -> dict[str, torch.Tensor]:
    batch = models.batch(side, lengths)
    valid = batch["attention_mask"].bool()
    return {
        "input_ids": torch.where(valid, batch["input_ids"].clamp(min=2), 1),
        "attention_mask": batch["attention_mask"],
    }


def _packed_calls(model: Any, inputs: dict[str, Any]) -> tuple[Any, int]:
    with mock.patch.object(unpadded, "_in_one_row", wraps=unpadded._in_one_row) as packing, torch.no_grad():
        return model(**inputs), packing.call_count


def test_packed_inputs_are_no_views() -> None:
    """Dynamo would compile again for the tensors of a recording, which are none."""
    ids, lengths = torch.arange(32).view(2, 16), [5, 16]
    mask = (torch.arange(16) < torch.tensor(lengths)[:, None]).long()
    per_token = {"input_ids": ids, "token_type_ids": ids}
    batch = unpadded._in_one_row(per_token, mask, lengths, 24, 2)
    inputs = batch.model_inputs()
    assert all(inputs[name]._base is None for name in ("input_ids", "position_ids", "token_type_ids"))
    assert inputs["input_ids"].tolist() == [[*range(5), *range(16, 32), 0, 0, 0]]
    assert inputs["position_ids"].tolist() == [[*range(2, 7), *range(2, 18), 2, 2, 2]]
    assert torch.equal(batch.unpack(inputs["input_ids"]), torch.where(mask.bool(), ids, 0))


@pytest.mark.parametrize("values", [[2], [-1], [0.5], [2, -2], [1]], ids=str)
def test_masks_with_other_values(values: list[float]) -> None:
    """At padding: they number sequences, or are no masks; also where the token of padding is."""
    for build in (models.bert, _roberta):
        model, inputs = hf.enable(build(), unpad=True), _inputs()
        inputs["attention_mask"] = inputs["attention_mask"].double()
        inputs["attention_mask"][0, 8 : 8 + len(values)] = torch.tensor(values, dtype=torch.float64)
        for extra in ({}, {"position_ids": torch.arange(16).expand(3, 16)}):
            with pytest.raises(UnsupportedError, match="above 1") if max(values) > 1 else nullcontext():
                _, calls = _packed_calls(model, inputs | extra)
                assert calls == 0


def test_numbered_masks_of_replaced_forward_methods() -> None:
    """They are refused where stof reads them, whichever `forward` runs."""
    inputs = _inputs()
    inputs["attention_mask"][0, :3] = 2
    model = hf.enable(models.bert(), unpad=True)
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(UnsupportedError, match="above 1"):
        model(**inputs)
    model = hf.enable(models.bert(), unpad=True)

    class Derived(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._stof_unpadded_class.forward(self, *args, **kwargs)

    model.__class__ = Derived
    with pytest.raises(UnsupportedError, match="above 1"):
        model(**inputs)
    model = hf.enable(models.bert(), unpad=True)
    model.set_attn_implementation("sdpa")
    model(**inputs)


@pytest.mark.parametrize("build", [models.bert, _roberta])
def test_outputs_are_those_of_the_padded_batch(build: Any) -> None:
    model, inputs = build(), _inputs()
    valid = inputs["attention_mask"].bool()
    extra = {"token_type_ids": torch.zeros_like(inputs["input_ids"]), "output_hidden_states": True}
    with torch.no_grad():
        want = model(**inputs, **extra)
    hf.enable(model, unpad=True)
    got, calls = _packed_calls(model, inputs | extra)
    assert calls == 1
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    for made, wanted in zip((got[0], *got.hidden_states), (want[0], *want.hidden_states), strict=True):
        torch.testing.assert_close(made[valid], wanted[valid], atol=2e-5, rtol=1e-5)
        assert not made[~valid].any()
    torch.testing.assert_close(got.pooler_output, want.pooler_output, atol=2e-5, rtol=1e-5)
    as_tuple, _ = _packed_calls(model, inputs | {"return_dict": False})
    torch.testing.assert_close(as_tuple[0], got[0])
    torch.testing.assert_close(as_tuple[1], got.pooler_output)


def test_gradients() -> None:
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()
    padded, inputs, gradients = copy.deepcopy(model), _inputs(), []
    hf.enable(model, unpad=True)
    for one in (padded, model):
        one(**inputs, labels=torch.tensor([0, 2, 1])).loss.backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    for made, wanted in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["left", "none", "positions", "embeds", "compiled"])
def test_other_calls_compute_on_padding(case: str) -> None:
    model, inputs = models.bert(), _inputs("left" if case == "left" else "right")
    given: dict[str, Any] = dict(inputs)
    if case == "none":
        given = {"input_ids": inputs["input_ids"]}
    elif case == "positions":
        given["position_ids"] = torch.arange(16).expand(3, -1)
    elif case == "embeds":
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    with torch.no_grad():
        want = model(**given)[0]
    hf.enable(model, unpad=True)
    called = torch.compile(model, backend="eager") if case == "compiled" else model
    got, calls = _packed_calls(called, given)
    assert calls == 0
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[0][valid], want[valid], atol=2e-5, rtol=1e-5)


def test_enabled_twice_and_disabled() -> None:
    model, inputs = models.bert(), _inputs()
    hf.enable(hf.enable(model, unpad=True), unpad=True)
    assert _packed_calls(model, inputs)[1] == 1
    hf.enable(model)
    assert _packed_calls(model, inputs)[1] == 0
    hf.disable(hf.enable(model, unpad=True))
    assert _packed_calls(model, inputs)[1] == 0
    copy.deepcopy(model)


def test_refused() -> None:
    for build in (models.llama, models.t5):
        refused = build()
        with pytest.raises(UnsupportedError, match="unpad=True takes encoders"):
            hf.enable(refused, unpad=True)
        assert refused.config._attn_implementation == "sdpa"
    model = hf.enable(AlbertModel(AlbertConfig(**SIZES, embedding_size=16)).eval(), unpad=True)
    with pytest.raises(UnsupportedError, match="returns pooler_output, which its pooler does not make"):
        model(**_inputs())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [_roberta, models.bert])
def test_optimized(build: Any) -> None:
    """Encoders are compiled once for packed batches of any number of tokens, and copies run them eagerly."""
    torch.compiler.reset()
    model, graphs = build(), dynamo_counters["stats"]["unique_graphs"]
    padded = copy.deepcopy(model)
    optimized = stof.optimize(model, unpad=True)
    seen = []
    for lengths in ((5, 16, 12), (16, 3, 9), (8, 8, 16), (2, 16, 1)):
        inputs = _inputs(lengths=lengths)
        with torch.no_grad():
            want = padded(**inputs)
            got, calls = _packed_calls(optimized, inputs)
        assert calls == 1
        valid = inputs["attention_mask"].bool()
        torch.testing.assert_close(got[0][valid], want[0][valid], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(got[1], want[1], atol=2e-5, rtol=1e-5)
        seen.append(dynamo_counters["stats"]["unique_graphs"] - graphs)
    assert 1 <= seen[1] == seen[-1], seen
    copied = copy.deepcopy(optimized)
    torch.testing.assert_close(_packed_calls(copied, inputs)[0][0], got[0], atol=2e-5, rtol=1e-5)
    assert dynamo_counters["stats"]["unique_graphs"] - graphs == seen[-1]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("build", [models.bert, _roberta, _modernbert])
def test_batches_that_are_widened_for_cuda_graphs(build: Any) -> None:
    """On a CPU nothing is recorded; batches are padded to the sizes of recordings all the same."""
    torch.compiler.reset()
    model = build()
    padded = copy.deepcopy(model)
    optimized = stof.optimize(model, unpad=True, cuda_graphs="whole")
    for lengths in ((5, 16, 12), (16, 16, 16), (1, 16, 3)):  # the second has no padding
        inputs = _inputs(lengths=lengths)
        valid = inputs["attention_mask"].bool()
        extra = {} if build is _modernbert else {"token_type_ids": torch.ones_like(inputs["input_ids"])}
        if build is _roberta:
            extra["token_type_ids"].zero_()
        with torch.no_grad():
            expected = padded(**inputs, **extra)
        got, calls = _packed_calls(optimized, inputs | extra)
        assert calls == 1
        torch.testing.assert_close(got[0][valid], expected[0][valid], atol=2e-5, rtol=1e-5)
        assert not got[0][~valid].any()
        if len(expected) > 1:
            torch.testing.assert_close(got[1], expected[1], atol=2e-5, rtol=1e-5)


def test_sizes_of_recordings() -> None:
    sizes = [unpadded._graph_tokens(tokens) for tokens in range(1, 16_385)]
    assert len(set(sizes)) == MOST_RECORDED
    assert all(0 <= size - tokens < max(256, tokens // 7) for tokens, size in enumerate(sizes, 1))
    assert all(unpadded._graph_tokens(size) == size for size in sizes)


def test_optimized_training() -> None:
    torch.compiler.reset()
    model = BertForSequenceClassification(
        BertConfig(**SIZES, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).train()
    padded, inputs, gradients = copy.deepcopy(model), _inputs(), []
    optimized = stof.optimize(model, unpad=True)
    for one in (padded, optimized):
        one(**inputs, labels=torch.tensor([0, 2, 1])).loss.backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    for made, wanted in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-4)


def test_optimize_refuses() -> None:
    for build, options, error in (
        (models.bert, {"cuda_graphs": True}, ArgumentError),
        (models.bert, {"dynamic": False}, ArgumentError),
        (models.bert, {"attention": False}, ArgumentError),
        (lambda: torch.nn.Linear(2, 2).eval(), {}, ArgumentError),
        (models.llama, {}, UnsupportedError),
    ):
        with pytest.raises(error, match="unpad=True takes encoders"):
            stof.optimize(build(), unpad=True, **options)


@pytest.mark.parametrize("optimized", [False, True])
def test_copies(optimized: bool) -> None:
    """Copies of a model compute by their weights."""
    model, inputs = models.bert(), _inputs()
    model = stof.optimize(model, unpad=True) if optimized else hf.enable(model, unpad=True)
    valid = inputs["attention_mask"].bool()
    first, _ = _packed_calls(model, inputs)
    replica = model._replicate_for_data_parallel()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model), replica):
        assert type(copied).__name__ == "BertModel"
        copied.encoder = copy.deepcopy(model.encoder)
        copied._modules["embeddings"] = copy.deepcopy(model.embeddings)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(1.1)
        got, calls = _packed_calls(copied, inputs)
        assert calls == 1
        want, calls = _packed_calls(copied, inputs | {"position_ids": torch.arange(16).expand(3, -1)})
        assert calls == 0
        torch.testing.assert_close(got[0][valid], want[0][valid], atol=2e-5, rtol=1e-5)
        assert (got[0] - first[0]).abs().max() > 0.1
        hf.enable(copied, unpad=False)
        assert _packed_calls(copied, inputs)[1] == 0
        assert _packed_calls(model, inputs)[1] == 1


def test_class() -> None:
    """It is the model's own again after `disable`, and its name is that in between."""
    model = models.bert()
    kind, registered = type(model), repr(type(model))
    hf.enable(model, unpad=True)
    assert isinstance(model, kind)
    assert repr(type(model)) == registered
    hf.disable(model)
    assert type(model) is kind


def test_saved(tmp_path: Any) -> None:
    model, inputs = hf.enable(models.bert(), unpad=True), _inputs()
    model.save_pretrained(tmp_path)
    loaded = type(models.bert()).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["BertModel"]
    valid = inputs["attention_mask"].bool()
    got, want = _packed_calls(model, inputs)[0], _packed_calls(loaded, inputs)[0]
    torch.testing.assert_close(got[0][valid], want[0][valid], atol=2e-5, rtol=1e-5)


def test_hooks_run_once() -> None:
    model, inputs = hf.enable(models.bert(), unpad=True), _inputs()
    seen = []

    def other_tokens(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(kwargs["input_ids"].shape)
        return args, kwargs | {"input_ids": (kwargs["input_ids"] + 1) % models.VOCABULARY}

    def doubled(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    model.register_forward_pre_hook(other_tokens, with_kwargs=True)
    model.register_forward_hook(doubled)
    got, calls = _packed_calls(model, inputs)
    assert calls == 1
    assert seen == [inputs["input_ids"].shape]
    hf.disable(model)
    want, _ = _packed_calls(model, inputs)
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[0][valid], want[0][valid], atol=4e-5, rtol=1e-5)


def test_padding_tokens_in_texts() -> None:
    """RoBERTa's positions pass over them, so such batches compute on padding."""
    model, inputs = _roberta(), _inputs()
    inputs["input_ids"][1, 4] = 1
    with torch.no_grad():
        want = model(**inputs)
    got, calls = _packed_calls(hf.enable(model, unpad=True), inputs)
    assert calls == 0
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[0][valid], want[0][valid], atol=2e-5, rtol=1e-5)


def test_float_masks() -> None:
    model, inputs = hf.enable(models.bert(), unpad=True), _inputs()
    want, _ = _packed_calls(model, inputs)
    got, calls = _packed_calls(model, inputs | {"attention_mask": inputs["attention_mask"].float()})
    assert calls == 1
    assert torch.equal(got[0], want[0])


def test_another_attention_implementation() -> None:
    model, inputs = hf.enable(models.bert(), unpad=True), _inputs()
    want, _ = _packed_calls(model, inputs)
    model.set_attn_implementation("sdpa")
    got, _ = _packed_calls(model, inputs)
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[0][valid], want[0][valid], atol=2e-5, rtol=1e-5)


class _TwoOutputs(BertModel):
    """Returns one more output of each row, which is not the pooler's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, pooled = super().forward(*args, **kwargs | {"return_dict": False})
        return hidden, pooled, hidden[:, 0].cumsum(-1)


class _Rows(BertModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, _ = super().forward(*args, **kwargs | {"return_dict": False})
        return hidden, (hidden[:, 0],)


class _Plain(BertModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[0]


@pytest.mark.parametrize("kind", [_TwoOutputs, _Rows, _Plain])
def test_unknown_outputs(kind: Any) -> None:
    """They are refused, or computed on padding where nobody asked for less."""
    model, inputs = kind(BertConfig(**SIZES)).eval(), _inputs()
    with torch.no_grad():
        want = model(**inputs)
    hf.enable(model, unpad=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="so it is not known for each sequence"):
            model(**inputs)
    unpadded.undo_unpad_calls(model)
    unpadded.unpad_calls(unpadded.encoders_of(model), required=False)
    valid = inputs["attention_mask"].bool()
    for expected in (1, 0):
        got, calls = _packed_calls(model, inputs)
        assert calls == expected
        first = [x[0] if isinstance(x, tuple) else x for x in (got, want)]
        torch.testing.assert_close(first[0][valid], first[1][valid], atol=2e-5, rtol=1e-5)


def test_masks_that_do_not_fit_packed_batches() -> None:
    model, inputs = hf.enable(models.bert(), unpad=True), _inputs()
    keep = torch.ones(16, 16, dtype=torch.bool).tril(3)
    hf.sparsify(model, masks.from_dense(keep))
    with pytest.raises(ShapeError):
        model(**inputs)
    hf.enable(model)
    want, _ = _packed_calls(model, inputs)
    unpadded.unpad_calls(unpadded.encoders_of(model), required=False)
    got, _ = _packed_calls(model, inputs)
    assert torch.equal(got[0], want[0])


@pytest.fixture
def texts_and_model() -> tuple[list[str], Any]:
    sentence_transformers = pytest.importorskip("sentence_transformers")

    from stof.demo.jobs import checkpoint

    texts = ["a", "a longer sentence of more words", "three words here"] * 3
    return texts, sentence_transformers.SentenceTransformer(str(checkpoint()), device="cpu", local_files_only=True)


@pytest.mark.parametrize("unpad", [None, True, False])
def test_sentence_transformers(texts_and_model: Any, unpad: bool | None) -> None:
    texts, model = texts_and_model
    want = model.encode(texts)
    hf.enable(model, unpad=unpad)
    with mock.patch.object(unpadded, "_in_one_row", wraps=unpadded._in_one_row) as packing:
        got = model.encode(texts)
    assert packing.call_count == (unpad is not False)
    assert abs(got - want).max() < 1e-5


def test_sentence_transformers_that_cannot_be_packed(texts_and_model: Any) -> None:
    """They compute on padding, without an error."""
    texts, model = texts_and_model
    model[0].model = AlbertModel(AlbertConfig(**SIZES | {"vocab_size": 40_000}, embedding_size=16)).eval()
    want = model.encode(texts)
    hf.enable(model)
    with mock.patch.object(unpadded, "_in_one_row", wraps=unpadded._in_one_row) as packing:
        got = [model.encode(texts) for _ in range(2)]
    assert packing.call_count == 1
    for one in got:
        assert abs(one - want).max() < 1e-5


def test_cross_encoder() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")

    from stof.demo.jobs import checkpoint

    torch.manual_seed(0)
    model = sentence_transformers.CrossEncoder(str(checkpoint()), device="cpu", local_files_only=True, num_labels=1)
    pairs = [("a question", "an answer"), ("one more", "a much longer answer to the question"), ("b", "c")]
    want = model.predict(pairs)
    hf.enable(model)
    with mock.patch.object(unpadded, "_in_one_row", wraps=unpadded._in_one_row) as packing:
        got = model.predict(pairs)
    assert packing.call_count == 1
    assert abs(got - want).max() < 1e-5

"""Packed batches and sparse masks on models, against padded batches and dense masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stof
from stof import masks
from stof.errors import ArgumentError, DtypeError, MaskError, ShapeError, UnsupportedError
from stof.runtime.private import without_hooks
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

from stof.integrations.transformers.sparsify import sparse_mask_of  # noqa: E402


def _hidden(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states[-1]


@pytest.mark.parametrize("max_tokens", [None, 23, 40])
@pytest.mark.parametrize("build", [models.bert, models.llama, models.gpt2])
def test_packed_equals_padded(build: Callable[[], Any], max_tokens: int | None) -> None:
    inputs = models.batch(lengths=(9, 23, 1, 14))
    if build is models.bert:
        inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    model = build()
    want = _hidden(model, inputs)
    model.set_attn_implementation("stof")
    packed = hf.pack(**inputs, max_tokens=max_tokens)
    assert packed.tokens == 9 + 23 + 1 + 14
    if max_tokens is None:
        assert packed.input_ids.shape == (1, packed.tokens)
    else:
        assert packed.input_ids.shape[1] <= max_tokens
    got = packed.unpack(_hidden(model, packed.model_inputs()))
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[valid], want[valid], atol=1e-5, rtol=1e-5)
    assert (got[~valid] == 0).all()


def test_layout_of_a_packed_batch() -> None:
    ids = torch.tensor([[0, 5, 6], [7, 0, 0], [0, 0, 0], [1, 2, 3]])
    packed = hf.pack(ids, ids > 0, labels=ids * 10, first_position=2)
    assert packed.input_ids.tolist() == [[5, 6, 7, 1, 2, 3]]
    assert packed.position_ids.tolist() == [[2, 3, 2, 2, 3, 4]]
    assert packed.extras["labels"].tolist() == [[50, 60, 70, 10, 20, 30]]
    assert packed.lengths == (2, 1, 0, 3)
    assert packed.mask == masks.documents(cu_seqlens=[0, 2, 3, 6])
    assert torch.equal(packed.unpack(packed.input_ids), ids)
    assert torch.equal(packed.pack_tokens(ids), packed.input_ids)
    assert packed.unpack(torch.ones(1, 6, 2), fill=-1).tolist()[1] == [[1, 1], [-1, -1], [-1, -1]]


def test_rows_are_filled_longest_first() -> None:
    valid = torch.arange(8) < torch.tensor([[3], [8], [5], [2]])
    packed = hf.pack(torch.arange(32).view(4, 8), valid, max_tokens=10)
    assert packed.input_ids.tolist() == [
        [8, 9, 10, 11, 12, 13, 14, 15, 24, 25],
        [16, 17, 18, 19, 20, 0, 1, 2, 0, 0],
    ]
    assert packed.position_ids.tolist() == [[*range(8), 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]]
    assert packed.mask == masks.documents([[0] * 8 + [1] * 2, [0] * 5 + [1] * 3 + [-1] * 2])


def test_a_packed_batch_refuses_other_attention() -> None:
    packed = hf.pack(**models.batch())
    for build in (models.bert, models.llama):
        for implementation in ("sdpa", "eager"):
            model = build()
            model.set_attn_implementation(implementation)
            with pytest.raises((UnsupportedError, AttributeError), match="stof mask"):
                _hidden(model, packed.model_inputs())


def test_a_packed_batch_cannot_be_continued() -> None:
    model = models.llama()
    model.set_attn_implementation("stof")
    packed = hf.pack(**models.batch())
    with torch.no_grad():
        cache = model(**packed.model_inputs(), use_cache=True).past_key_values
        with pytest.raises(ShapeError, match="documents"):
            model(**packed.model_inputs(), past_key_values=cache)


def test_packing_refuses() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="no token"):
        hf.pack(ids, torch.zeros_like(ids))
    with pytest.raises(ShapeError, match="token_type_ids"):
        hf.pack(ids, ids, token_type_ids=ids[:, :2])
    with pytest.raises(DtypeError, match="float"):
        hf.pack(ids, ids.float())
    with pytest.raises(ArgumentError, match="longest sequence, 3"):
        hf.pack(ids, ids, max_tokens=2)
    with pytest.raises(ArgumentError, match="first_position"):
        hf.pack(ids, ids, first_position=-1)
    with pytest.raises(ShapeError, match="packed values"):
        hf.pack(ids, ids).unpack(torch.ones(2, 3))


SPARSE = masks.longformer(window=2, global_tokens=1)


def _dense(mask: masks.Mask, valid: torch.Tensor) -> torch.Tensor:
    """Positions are those within the sequences."""
    dense = mask.to_dense(valid.shape[1])[0, 0]
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    return torch.stack([dense[row][:, row] for row in positions])[:, None] & valid[:, None, None, :].bool()


@pytest.mark.parametrize("side", ["right", "left"])
def test_sparsify_bert(side: str) -> None:
    model, inputs = models.bert(), models.batch(side)
    valid = inputs["attention_mask"]
    want = _hidden(model, dict(inputs, attention_mask=_dense(SPARSE, valid)))
    plain = _hidden(model, inputs)
    model.set_attn_implementation("stof")
    with hf.sparsify(model, SPARSE) as sparse:
        assert len(sparse.layers) == 2
        got = _hidden(model, inputs)
    torch.testing.assert_close(got[valid.bool()], want[valid.bool()], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(_hidden(model, inputs), plain, atol=1e-5, rtol=1e-5)
    assert (got - plain).abs().max() > 1e-2


def test_sparsify_by_text_and_per_layer() -> None:
    model, ids = models.bert(), models.batch()["input_ids"]
    model.set_attn_implementation("stof")

    def out(mask: Any) -> torch.Tensor:
        with hf.sparsify(model, mask):
            return _hidden(model, {"input_ids": ids})

    assert torch.equal(out("longformer(window=2, global_tokens=1)"), out(SPARSE))
    only_second = out({1: SPARSE})
    assert torch.equal(only_second, out(lambda layer: SPARSE if layer == 1 else None))
    assert not torch.allclose(only_second, out(SPARSE))
    assert not torch.allclose(only_second, out(None))


@pytest.mark.parametrize("build", [models.gpt2, models.llama, models.mistral])
def test_sparsify_generation(build: Callable[[], Any]) -> None:
    """Greedy steps with a cache follow the sparse mask of the whole sequence."""
    model, inputs = build(), models.batch("left", (12, 7))
    model.set_attn_implementation("stof")
    sparse = masks.sliding_window(3) | masks.strided(1, 4)
    with hf.sparsify(model, sparse), torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    valid = torch.nn.functional.pad(inputs["attention_mask"], (0, 8), value=1)
    own = masks.sliding_window(5) if build is models.mistral else masks.causal()
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(ids, attention_mask=_dense(own & sparse, valid), position_ids=positions).logits
    assert torch.equal(logits[:, 11:-1].argmax(-1), ids[:, 12:])


def test_sparsify_leaves_cross_attention_alone() -> None:
    model = hf.enable(models.t5())
    with hf.sparsify(model, SPARSE) as sparse:
        assert [name.rsplit(".", 1)[1] for name in sparse.layers] == ["SelfAttention"] * 4
    encoder_only = hf.sparsify(model.encoder, SPARSE)
    inputs = models.batch() | {"decoder_input_ids": models.batch(lengths=(4, 4, 4))["input_ids"]}
    with torch.no_grad():
        got = model(**inputs).logits
        encoder_only.remove()
        dense = _dense(SPARSE, inputs["attention_mask"])
        encoded = model.encoder(inputs["input_ids"], attention_mask=dense)
        want = model(**inputs, encoder_outputs=encoded).logits
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-5)


def test_names_further_up_do_not_make_cross_attention() -> None:
    blocks = torch.nn.ModuleDict({"cross": hf.enable(models.bert()).encoder.layer[0]})
    with hf.sparsify(blocks, masks.causal()) as sparse:
        assert sparse.layers == ("cross.attention.self",)


def test_sparsify_bert_decoder_with_cross_attention() -> None:
    model = models.bert(is_decoder=True, add_cross_attention=True)
    model.set_attn_implementation("stof")
    with hf.sparsify(model, SPARSE) as sparse:
        assert len(sparse.layers) == 2
        assert not any("cross" in name for name in sparse.layers)
        with torch.no_grad():
            model(**models.batch(), encoder_hidden_states=torch.randn(3, 5, 32))


def test_sparsify_nests_and_is_undone() -> None:
    model = models.vit()
    model.set_attn_implementation("stof")
    layers = [module for _, module in model.named_modules() if hasattr(module, "is_causal")]
    hooks = [len(layer._forward_pre_hooks) for layer in layers]
    with hf.sparsify(model, SPARSE):
        with hf.sparsify(model, masks.causal()):
            assert {sparse_mask_of(layer) for layer in layers} == {masks.causal()}
        assert {sparse_mask_of(layer) for layer in layers} == {SPARSE}
    assert {sparse_mask_of(layer) for layer in layers} == {None}
    assert [len(layer._forward_pre_hooks) for layer in layers] == hooks


def test_sparse_plans_are_shared_by_layers() -> None:
    model = models.bert(num_hidden_layers=4)
    model.set_attn_implementation("stof")
    with hf.sparsify(model, SPARSE):
        _hidden(model, models.batch())
    assert stof.plan_cache.info().misses == 1


def test_packed_and_sparse() -> None:
    model, inputs = models.bert(), models.batch()
    model.set_attn_implementation("stof")
    packed = hf.pack(**inputs)
    window = masks.sliding_window(3, 3)  # the same mask at every position, so packing does not change it
    with hf.sparsify(model, window):
        got = packed.unpack(_hidden(model, packed.model_inputs()))
        want = _hidden(model, inputs)
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[valid], want[valid], atol=1e-5, rtol=1e-5)


def test_the_check_keeps_hooks_registered_meanwhile() -> None:
    """transformers registers the hooks that collect outputs in a model's first call, which may be the check's."""
    layer, calls = torch.nn.Linear(2, 2), list[str]()
    layer.register_forward_hook(lambda *_: calls.append("user"))
    with without_hooks(layer, keep=("torch",)):
        layer.register_forward_hook(lambda *_: calls.append("added"))
        layer(torch.ones(2))
        assert calls == ["added"]
    layer(torch.ones(2))
    assert calls == ["added", "user", "added"]


def test_sparsify_refuses() -> None:
    model = models.bert()
    with pytest.raises(ArgumentError, match="attn_implementation='sdpa'"):
        hf.sparsify(model, SPARSE)
    model.set_attn_implementation("stof")
    with pytest.raises(ArgumentError, match="no self-attention layer"):
        hf.sparsify(torch.nn.Linear(2, 2), SPARSE)
    with pytest.raises(ArgumentError, match=r"layers 0 to 1.*\[2\]"):
        hf.sparsify(model, {2: SPARSE})
    with pytest.raises(MaskError, match="Tensor"):
        hf.sparsify(model, torch.ones(3, 3, dtype=torch.bool))
    with hf.sparsify(model, SPARSE):
        model.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedError, match="another attn_implementation than 'stof'"):
            _hidden(model, models.batch())


@pytest.mark.parametrize("given", [{"max_tokens": float("nan")}, {"max_tokens": "8"}, {"first_position": 0.5}])
def test_options_of_other_types(given: dict[str, Any]) -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ArgumentError, match="is an int"):
        hf.pack(ids, ids, **given)


def test_only_tensors_are_packed() -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    for wrong in ((ids, "x"), ("x", ids)):
        with pytest.raises(DtypeError, match=r"is a torch.Tensor, got str"):
            hf.pack(*wrong)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"are a torch.Tensor, got list"):
        hf.pack(ids, ids).unpack([1])  # type: ignore[arg-type]

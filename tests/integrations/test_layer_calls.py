"""A sparse mask counts in every call of its layer: whatever replaced the layer's code, and for self-attention alone."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stof import masks
from stof.errors import ShapeError, StofError, UnsupportedError
from stof.masks import Mask
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")
import transformers  # noqa: E402
from transformers.models.bart.modeling_bart import BartAttention  # noqa: E402
from transformers.models.sam.modeling_sam import SamAttention, SamConfig  # noqa: E402

LENGTH = 20
Replace = Callable[[nn.Module], None]


def _mask() -> Mask:
    """A window drawn at random."""
    return masks.sliding_window(*torch.randint(1, 5, (2,)).tolist())


def _attention_of_its_own(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a patch that brings its own kernel does: the interface and its mask play no part."""
    batch, length, _ = hidden_states.shape
    q, k, v = (
        projection(hidden_states).view(batch, length, -1, layer.head_dim).transpose(1, 2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.o_proj(out.transpose(1, 2).flatten(2)), None


def _closure(layer: nn.Module) -> None:
    before = layer.forward
    layer.forward = lambda *args, **kwargs: before(*args, **kwargs)


def _dictionary(layer: nn.Module) -> None:
    before = {id(layer): layer.forward}
    layer.forward = lambda *args, **kwargs: before[id(layer)](*args, **kwargs)


def _named_class(layer: nn.Module) -> None:
    kind = type(layer)
    layer.forward = lambda *args, **kwargs: kind.forward(layer, *args, **kwargs)


def _as_accelerate_does(layer: Any) -> None:
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    layer._old_forward = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(forward, layer), layer._old_forward)


class _Adapter(nn.Module):
    """LoRA as kohya's scripts apply it: the layer's `forward` becomes the adapter's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.org_forward = layer.forward
        layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.org_forward(*args, **kwargs)


class _Callable:
    def __init__(self, layer: nn.Module) -> None:
        self.before = layer.forward
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.before(*args, **kwargs)


def _set_partial(layer: nn.Module) -> None:
    layer.forward = functools.partial(layer.forward)


def _set_compiled(layer: nn.Module) -> None:
    layer.forward = torch.compile(layer.forward, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], object]] = {
    "closure": _closure,
    "dictionary": _dictionary,
    "class": _named_class,
    "accelerate": _as_accelerate_does,
    "adapter": _Adapter,
    "callable": _Callable,
    "partial": _set_partial,
    "compiled": _set_compiled,
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("when", ["before", "enabled", "sparsified"])
def test_wrappers_of_the_forward_keep_the_mask(name: str, when: str) -> None:
    torch.compiler.reset()
    model, ids, mask = models.llama(), torch.randint(3, 60, (1, LENGTH)), _mask()
    plain = hf.enable(copy.deepcopy(model))
    with torch.no_grad(), hf.sparsify(plain, mask):
        want = plain(ids).logits
    steps: dict[str, Callable[[], object]] = {
        "before": lambda: None,
        "enabled": lambda: hf.enable(model),
        "sparsified": lambda: hf.sparsify(model, mask),
    }
    for step, run in steps.items():
        run()
        if step == when:
            WRAPPERS[name](model.model.layers[int(torch.randint(2, ()))].self_attn)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want)


def test_a_forward_that_leaves_attention_out() -> None:
    """It computes what it did; with a sparse mask, or packed sequences that it does not keep apart, it is refused."""
    model, ids = models.llama(), torch.randint(3, 60, (1, LENGTH))
    layer = model.model.layers[1].self_attn
    layer.forward = types.MethodType(_attention_of_its_own, layer)
    positions = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    with torch.no_grad():
        want = model(ids).logits
        torch.testing.assert_close(hf.enable(model)(ids).logits, want)
        with pytest.raises(UnsupportedError, match="cannot run packed sequences"):
            model(ids, position_ids=positions)
        with hf.sparsify(model, _mask()), pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn.*never called"):
            model(ids)
        torch.testing.assert_close(model(ids).logits, want)


def _after_sparsify(layer: Any) -> None:
    layer.forward = types.MethodType(_attention_of_its_own, layer)


def _holds_what_it_never_calls(layer: Any) -> None:
    before = layer.forward
    layer.forward = lambda hidden_states, **kwargs: (
        before(hidden_states, **kwargs) if hidden_states is None else _attention_of_its_own(layer, hidden_states)
    )


@pytest.mark.parametrize("replace", [_after_sparsify, _holds_what_it_never_calls])
def test_a_call_that_leaves_the_mask_out_is_refused(replace: Replace) -> None:
    model, ids = hf.enable(models.llama()), torch.randint(3, 60, (1, LENGTH))
    layer = model.model.layers[1].self_attn
    with torch.no_grad(), hf.sparsify(model, _mask()):
        model(ids)
        replace(layer)
        with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn.*never called stof's attention"):
            model(ids)
        del layer.forward
        model(ids)
    replace(layer)
    with torch.no_grad():
        model(ids)  # nothing is asked of layers without a mask


def test_a_compiled_call_that_leaves_the_mask_out_is_refused() -> None:
    torch.compiler.reset()
    model, ids = hf.enable(models.llama(num_hidden_layers=1)), torch.randint(3, 60, (1, LENGTH))
    with torch.no_grad(), hf.sparsify(model, _mask()):
        model.model.layers[0].compile(backend="eager")
        model(ids)
        _after_sparsify(model.model.layers[0].self_attn)
        with pytest.raises(UnsupportedError, match="never called stof's attention"):
            model(ids)


def test_a_block_that_leaves_its_layer_out_is_refused() -> None:
    """Its `forward` replaced, or another layer put in the layer's place."""
    model, ids = hf.enable(models.llama()), torch.randint(3, 60, (1, LENGTH))
    block = model.model.layers[0]
    with torch.no_grad(), hf.sparsify(model, _mask()):
        block.forward = lambda x, *args, **kwargs: x + _attention_of_its_own(block.self_attn, x)[0]
        with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn.*around it"):
            model(ids)
        del block.forward
        block.self_attn = copy.deepcopy(model.model.layers[1].self_attn)
        hf.sparsify(block, None)
        with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn"):
            model(ids)


def test_calls_at_the_same_time_and_copies() -> None:
    model, ids = hf.enable(models.llama()), torch.randint(3, 60, (1, LENGTH))
    failures: list[StofError] = []

    def run() -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    model(ids)
        except StofError as error:
            failures.append(error)

    with hf.sparsify(model, _mask()):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        copied = copy.deepcopy(model)
        layer = copied.model.layers[0].self_attn
        layer.forward = types.MethodType(_attention_of_its_own, layer)
        with torch.no_grad():
            model(ids)
            with pytest.raises(UnsupportedError, match="never called"):
                copied(ids)


_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize("name", ["LayoutLM", "MarkupLM", "Splinter"])
def test_layers_without_is_causal(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=61, initializer_range=0.3, **_SIZES)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids, mask = torch.randint(3, 60, (1, LENGTH)), _mask()
    states: list[torch.Tensor] = []
    hook = model.encoder.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        model(ids)
        hook.remove()
        keep = mask.to_dense(LENGTH)
        model.set_attn_implementation("eager")
        additive = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~keep, torch.finfo(torch.float32).min)
        want = model.encoder(states[0], additive).last_hidden_state
        hf.enable(model)
        with hf.sparsify(model, mask) as sparse:
            assert sparse.layers == ("encoder.layer.0.attention.self",)
            torch.testing.assert_close(model(ids).last_hidden_state, want, atol=3e-5, rtol=1e-4)


def test_vision_towers_without_is_causal() -> None:
    """Llama 4 and Mllama, whose text layers have it."""
    from transformers.models.llama4.modeling_llama4 import Llama4VisionConfig, Llama4VisionModel
    from transformers.models.mllama.modeling_mllama import MllamaVisionConfig, MllamaVisionModel

    towers = nn.ModuleList(
        [
            Llama4VisionModel(Llama4VisionConfig(**_SIZES, image_size=28, patch_size=14)),
            MllamaVisionModel(
                MllamaVisionConfig(
                    hidden_size=32, num_hidden_layers=1, num_global_layers=1, attention_heads=2, intermediate_size=48,
                    image_size=28, patch_size=14, intermediate_layers_indices=[0],
                )
            ),
        ]
    )  # fmt: skip
    with hf.sparsify(hf.enable(towers), masks.causal()) as sparse:
        assert [name.rsplit(".", 1)[1] for name in sparse.layers] == ["self_attn"] * 3


def test_resamplers_attend_to_another_sequence() -> None:
    """Idefics2 calls them `self_attn`."""
    perceiver = {
        "hidden_size": 32, "resampler_n_latents": 8, "resampler_depth": 1, "resampler_n_heads": 2,
        "resampler_head_dim": 16, "num_key_value_heads": 1,
    }  # fmt: skip
    config = transformers.Idefics2Config(
        text_config={"model_type": "mistral", "vocab_size": 61, "num_key_value_heads": 1, **_SIZES},
        vision_config={"image_size": 28, "patch_size": 7, **_SIZES},
        perceiver_config=perceiver,
    )
    model = hf.enable(transformers.Idefics2Model(config).eval())
    context, valid = torch.randn(1, 16, 32), torch.ones(1, 16)
    resampler = model.connector.perceiver_resampler
    with torch.no_grad():
        want = resampler(context, valid)
        with hf.sparsify(model, _mask()) as sparse:
            assert not any("resampler" in name for name in sparse.layers)
            assert len(sparse.layers) == 2
            torch.testing.assert_close(resampler(context, valid), want)


def test_calls_tell_cross_attention_from_self_attention() -> None:
    """Also where both have as many tokens, and no name says it."""
    layer = BartAttention(32, 4, config=transformers.BartConfig(d_model=32, encoder_attention_heads=4)).eval()
    layer.config._attn_implementation = "stof"
    states, length = torch.randn(1, LENGTH, 32), int(torch.randint(1, 2 * LENGTH, ()))
    others = [torch.randn(1, LENGTH, 32), torch.randn(1, length, 32)]
    with torch.no_grad():
        plain = [layer(states, other)[0] for other in (None, *others)]
        with hf.sparsify(nn.ModuleDict({"mixer": layer}), _mask()):
            assert not torch.allclose(layer(states)[0], plain[0])
            assert not torch.allclose(layer(states, key_value_states=states)[0], plain[0])
            for other, want in zip(others, plain[1:], strict=True):
                torch.testing.assert_close(layer(states, other)[0], want)
                torch.testing.assert_close(layer(states, key_value_states=other)[0], want)


def test_keys_that_may_be_another_sequence_are_refused() -> None:
    layer = SamAttention(
        SamConfig(mask_decoder_config={"hidden_size": 32, "num_attention_heads": 2}).mask_decoder_config
    )
    layer.eval().config._attn_implementation = "stof"
    queries, keys = torch.randn(1, 1, LENGTH, 32), torch.randn(1, 1, 9, 32)
    with torch.no_grad():
        plain, other = layer(queries, queries, queries)[0], layer(queries, keys, keys)[0]
        with hf.sparsify(nn.ModuleDict({"attn": layer}), _mask()):
            assert not torch.allclose(layer(queries, queries, queries)[0], plain)
            torch.testing.assert_close(layer(queries, keys, keys)[0], other)
            with pytest.raises(ShapeError, match=r"attn has a sparse mask.*whether they are one sequence"):
                layer(queries, queries + 1, queries)

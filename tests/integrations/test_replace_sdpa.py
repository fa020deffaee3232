"""PyTorch's attention replaced by STOF's: equal to PyTorch's without a mask, and with one to its additive form."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_upper_left
from torch.utils.checkpoint import checkpoint

import stof
from stof import masks
from stof.errors import ArgumentError, MaskError, StofError, UnsupportedError
from stof.integrations.torch import sdpa

LENGTH, BATCH, HEADS, WIDTH = 20, 3, 4, 32
WINDOW = masks.sliding_window(3, 2)
SEEN = WINDOW.to_dense(LENGTH)[0, 0]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:There is a performance drop:UserWarning",
)


@pytest.fixture(autouse=True)
def _no_compiled_code() -> None:
    torch._dynamo.reset()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spy() -> Any:
    """Counts the calls that STOF computes."""
    return mock.patch.object(sdpa, "scaled_dot_product_attention", wraps=sdpa.scaled_dot_product_attention)


def additive(mask: Tensor, *, seen: bool) -> Tensor:
    """A bool mask, where true means seen or not seen, as one to add."""
    return torch.where(mask, 0.0, -torch.inf) if seen else torch.where(mask, -torch.inf, 0.0)


def check(got: Tensor, want: Tensor) -> None:
    """Compare, but for rows without keys, which PyTorch may answer by NaN."""
    assert got.isfinite().all()
    finite = want.isfinite()
    assert finite.any()
    torch.testing.assert_close(got[finite], want[finite].float())


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.3},
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": draw(2, 1, LENGTH, LENGTH) > 0},
    "float": lambda: {"attn_mask": draw(HEADS, LENGTH, LENGTH)},
    "grouped": lambda: {"enable_gqa": True},
    "no heads": dict,
    "more dimensions": dict,
}


@pytest.mark.parametrize("name", CALLS)
def test_function(name: str) -> None:
    options = CALLS[name]()
    lead = {"no heads": (3,), "more dimensions": (2, 3, HEADS)}.get(name, (2, HEADS))
    q, k, v = (draw(*lead, LENGTH, 16, seed=n) for n in range(3))
    if name == "grouped":
        k, v = k[:, :2], v[:, :2]
    with torch.inference_mode(), spy() as calls:
        with stof.replace_sdpa():
            got = F.scaled_dot_product_attention(q, k, v, **options)
        with stof.replace_sdpa(WINDOW):
            windowed = F.scaled_dot_product_attention(q, k, v, **options)
    assert calls.call_count == 2
    check(got, F.scaled_dot_product_attention(q, k, v, **options))
    bias = options.pop("attn_mask", torch.zeros(LENGTH, LENGTH))
    if options.pop("is_causal", False):
        bias = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    bias = additive(bias, seen=True) if bias.dtype == torch.bool else bias
    bias = torch.where(SEEN, bias, -torch.inf).double()
    check(windowed, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias, **options))


ATTN_MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": (draw(LENGTH, LENGTH) > 0.5).fill_diagonal_(False),
    "float": draw(LENGTH, LENGTH),
    "heads": draw(HEADS * BATCH, LENGTH, LENGTH) > 0.5,
    "causal": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1),
}
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [15], [9]])
PADDINGS = {"none": None, "bool": PADDING, "float": additive(PADDING, seen=False)}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("attn_mask", ATTN_MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(attn_mask: str, padding: str, batch_first: bool) -> None:
    layer = _with_biases(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).eval())
    x = draw(BATCH, LENGTH, WIDTH) if batch_first else draw(LENGTH, BATCH, WIDTH)
    options = {"attn_mask": ATTN_MASKS[attn_mask], "key_padding_mask": PADDINGS[padding], "need_weights": False}
    with torch.inference_mode(), spy() as calls:
        with stof.replace_sdpa():
            got = layer(x, x, x, **options, is_causal=attn_mask == "causal")[0]
        with stof.replace_sdpa(WINDOW):
            windowed = layer(x, x, x, **options, is_causal=attn_mask == "causal")[0]
    assert calls.call_count == 2
    # With gradients PyTorch does not take its fast path, whose results for padding are 0.
    check(got, layer(x, x, x, **options)[0].detach())
    layer_mask = options["attn_mask"]
    if layer_mask is None or layer_mask.dtype == torch.bool:
        options["attn_mask"] = ~SEEN if layer_mask is None else layer_mask | ~SEEN
    else:
        options["attn_mask"] = torch.where(SEEN, layer_mask, -torch.inf)
    check(windowed, layer(x, x, x, **options)[0].detach())


def _with_biases(layer: nn.Module) -> nn.Module:
    """`layer` with biases that are not 0."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.copy_(draw(*parameter.shape, seed=len(name)))
    return layer


@pytest.mark.parametrize("config", [{"bias": False}, {"kdim": 24, "vdim": 40}, {"kdim": 24, "vdim": 40, "bias": False}])
@pytest.mark.parametrize("batched", [True, False])
def test_projections(config: dict[str, Any], batched: bool) -> None:
    layer = _with_biases(nn.MultiheadAttention(WIDTH, HEADS, **config).eval())
    widths = (WIDTH, config.get("kdim", WIDTH), config.get("vdim", WIDTH))
    lengths = (7, LENGTH, LENGTH)
    shapes = [
        (length, BATCH, width) if batched else (length, width) for length, width in zip(lengths, widths, strict=True)
    ]
    q, k, v = (draw(*shape, seed=n) for n, shape in enumerate(shapes))
    with torch.inference_mode(), spy() as calls, stof.replace_sdpa():
        got = layer(q, k, v, need_weights=False)[0]
    assert calls.call_count == 1
    check(got, layer(q, k, v, need_weights=False)[0].detach())


def test_encoder_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = draw(BATCH, LENGTH, WIDTH)
    with torch.inference_mode():
        padded = encoder(x, src_key_padding_mask=PADDING)
        with spy() as calls, stof.replace_sdpa():
            got = encoder(x, src_key_padding_mask=PADDING)
        assert calls.call_count == 2
        torch.testing.assert_close(got[~PADDING], padded[~PADDING])
        want = encoder(x, mask=~SEEN)
        with stof.replace_sdpa(WINDOW):
            torch.testing.assert_close(encoder(x), want)
        torch.testing.assert_close(encoder(x), encoder(x, mask=torch.zeros_like(SEEN)))


def test_cross_attention() -> None:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True).eval()
    source, target = draw(BATCH, LENGTH, WIDTH), draw(BATCH, 12, WIDTH, seed=1)
    short = WINDOW.to_dense(12)[0, 0]
    with torch.inference_mode():
        want = model(source, target, src_mask=~SEEN, tgt_mask=~short)
        with stof.replace_sdpa(WINDOW):
            torch.testing.assert_close(model(source, target), want)
        want = model(source, target)
        with spy() as calls, stof.replace_sdpa():
            torch.testing.assert_close(model(source, target), want)
        assert calls.call_count == 3
        with (
            pytest.raises(UnsupportedError, match="may be cross-attention"),
            stof.replace_sdpa(WINDOW),
        ):
            model(source, source)


def test_compiled() -> None:
    """Compiled code serves only calls under the mask, or the absence of one, that it was compiled for."""
    q = draw(1, 2, LENGTH, 16)
    compiled = torch.compile(
        lambda x: F.scaled_dot_product_attention(x.sin(), x, x) + 1, backend="eager", fullgraph=True
    )
    blocks = [
        None, WINDOW, masks.causal(), WINDOW, None, masks.documents(torch.tensor([0] * 4 + [1] * 16)),
        masks.documents(torch.tensor([0] * 9 + [1] * 11)), masks.from_function(lambda b, h, i, j: i > j), WINDOW,
    ]  # fmt: skip
    with torch.inference_mode():
        for mask in blocks:
            want = stof.attention(q.sin(), q, q, mask) + 1
            if mask is None:
                torch.testing.assert_close(compiled(q), want)
            else:
                with stof.replace_sdpa(mask):
                    torch.testing.assert_close(compiled(q), want)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_layers(backend: str) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), 1).eval()
    compiled = torch.compile(encoder, backend=backend)
    x = draw(BATCH, LENGTH, WIDTH)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), encoder(x))
            with stof.replace_sdpa(WINDOW):
                torch.testing.assert_close(compiled(x), encoder(x))
            with stof.replace_sdpa():
                torch.testing.assert_close(compiled(x), encoder(x))


def test_block_inside_compiled_code() -> None:
    q = draw(1, 2, LENGTH, 16)

    def call(x: Tensor) -> Tensor:
        with stof.replace_sdpa(WINDOW):
            return F.scaled_dot_product_attention(x, x, x)

    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(call, backend="eager")(q), stof.attention(q, q, q, WINDOW))


def test_optimize() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), 1).eval()
    x = draw(BATCH, LENGTH, WIDTH)
    with torch.inference_mode():
        want, full = encoder(x, mask=~SEEN), encoder(x)
        torch.testing.assert_close(stof.optimize(encoder, mask=WINDOW)(x), want)
        torch.testing.assert_close(stof.optimize(encoder)(x), full)


def test_optimized_models_keep_their_masks() -> None:
    """In copies, inside of other modules and compiled again."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True).eval()
    x = draw(BATCH, LENGTH, WIDTH)
    with torch.inference_mode():
        want = layer(x, src_mask=~SEEN)
        optimized = stof.optimize(layer, mask=WINDOW)
        for module in (optimized, copy.deepcopy(optimized), nn.Sequential(optimized)):
            torch.testing.assert_close(module(x), want)
            torch.testing.assert_close(torch.compile(module, backend="eager")(x), want)
        again = stof.optimize(stof.optimize(layer), mask=WINDOW)
        torch.testing.assert_close(again(x), want)
        torch.testing.assert_close(stof.optimize(again)(x), layer(x))
        full = layer(x, src_mask=~masks.causal().to_dense(LENGTH)[0, 0])
        torch.testing.assert_close(stof.optimize(again, mask=masks.causal())(x), full)
        graphs = stof.optimize(layer, mask=WINDOW, cuda_graphs="whole")
        for _ in range(3):
            torch.testing.assert_close(graphs(x), want)
    weight = layer.linear1.weight.data_ptr()
    for wrong in (5, "nonsense("):
        with pytest.raises(MaskError):
            stof.optimize(layer, mask=wrong)
    assert layer.linear1.weight.data_ptr() == weight


def test_subclasses_of_tensors() -> None:
    """They may compute attention themselves, and hold other values than their memory."""
    q = draw(1, 2, LENGTH, 16)
    lower = causal_upper_left(LENGTH, LENGTH)
    with torch.inference_mode():
        want = F.scaled_dot_product_attention(q, q, q, lower)
        with stof.replace_sdpa():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q, lower), want)
        with pytest.raises(UnsupportedError, match="is given CausalBias"), stof.replace_sdpa(WINDOW):
            F.scaled_dot_product_attention(q, q, q, lower)


def test_wrong_shapes_are_pytorchs_to_refuse() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS).eval()
    x, y, short = draw(LENGTH, BATCH, WIDTH), draw(LENGTH, 2, WIDTH), draw(5, BATCH, WIDTH)
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x, x, x), {"key_padding_mask": PADDING.T}),
        ((x, y, y), {}),
        ((x, x, short), {}),
        ((x[:, 0], x[:, 0], x[:, 0]), {"key_padding_mask": PADDING}),
        ((x, x, x), {"attn_mask": SEEN[:3]}),
        ((x, x, x), {"is_causal": True}),
    ]
    for inputs, options in wrong:
        with torch.inference_mode():
            with stof.replace_sdpa(), pytest.raises((RuntimeError, AssertionError)) as found:
                layer(*inputs, **options, need_weights=False)
            assert not isinstance(found.value, StofError)
            with pytest.raises(UnsupportedError), stof.replace_sdpa(WINDOW):
                layer(*inputs, **options, need_weights=False)


def test_fast_paths_of_other_threads() -> None:
    """A block without a mask leaves them."""
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode():
        with stof.replace_sdpa():
            assert torch.backends.mha.get_fastpath_enabled()
        q = draw(1, 2, LENGTH, 16)
        with stof.replace_sdpa(WINDOW):
            assert not torch.backends.mha.get_fastpath_enabled()
            F.scaled_dot_product_attention(q, q, q)
    assert torch.backends.mha.get_fastpath_enabled()


def test_gradients_are_pytorchs() -> None:
    """A checkpoint computes again outside the block, so what it saves must be PyTorch's inside as well."""
    weights = [draw(2, 2, LENGTH, 16, seed=n).requires_grad_() for n in range(3)]

    def gradients(block: Any) -> list[Tensor]:
        with block:
            out = checkpoint(F.scaled_dot_product_attention, *weights, use_reentrant=False).sum()
        return list(torch.autograd.grad(out, weights))

    for got, want in zip(gradients(stof.replace_sdpa()), gradients(contextlib.nullcontext()), strict=True):
        assert torch.equal(got, want)


def test_refused() -> None:
    q = draw(1, 2, LENGTH, 16)
    layer = nn.MultiheadAttention(WIDTH, HEADS).eval()
    x = draw(LENGTH, WIDTH)
    with pytest.raises(UnsupportedError, match="gradients disabled"), stof.replace_sdpa(WINDOW):
        pass
    with torch.inference_mode():
        with pytest.raises(UnsupportedError, match="no attention was computed"), stof.replace_sdpa(WINDOW):
            torch.softmax(q @ q.mT, -1) @ q
        with pytest.raises(UnsupportedError, match="5 queries and 20 keys"), stof.replace_sdpa(WINDOW):
            F.scaled_dot_product_attention(q[:, :, :5], q, q)
        with pytest.raises(UnsupportedError, match="need_weights=False"), stof.replace_sdpa(WINDOW):
            layer(x, x, x)
        with pytest.raises(ArgumentError, match="inside another"), stof.replace_sdpa(), stof.replace_sdpa():
            pass
        with (
            pytest.raises(UnsupportedError, match="gradients are enabled"),
            stof.replace_sdpa(WINDOW),
            torch.enable_grad(),
        ):
            F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ZeroDivisionError), stof.replace_sdpa(WINDOW):
            1 / 0  # noqa: B018
        assert not torch.overrides._get_current_function_mode_stack()


def test_computed_by_pytorch() -> None:
    """Without a mask, what STOF does not take gives PyTorch's result, or PyTorch's error."""
    q = draw(1, 2, LENGTH, 16)
    layer = nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True).eval()
    x = draw(LENGTH, WIDTH)
    with torch.inference_mode():
        torch.manual_seed(0)
        want = (
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
            layer(x, x, x, need_weights=False)[0],
            *layer(x, x, x),
        )
        torch.manual_seed(0)
        with stof.replace_sdpa():
            got = (
                F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
                layer(x, x, x, need_weights=False)[0],
                *layer(x, x, x),
            )
            torch.testing.assert_close(got, want)
            with pytest.raises(RuntimeError, match="Expected size"):
                F.scaled_dot_product_attention(q, q[..., :7], q)
            torch.testing.assert_close(
                torch.func.vmap(F.scaled_dot_product_attention)(q[None], q[None], q[None])[0],
                stof.attention(q, q, q),
            )


def test_threads() -> None:
    q = draw(1, 2, LENGTH, 16)
    results = []

    def call() -> None:
        with torch.inference_mode():
            results.append(F.scaled_dot_product_attention(q, q, q))

    with torch.inference_mode(), stof.replace_sdpa(WINDOW):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        call()
    torch.testing.assert_close(results, [stof.attention(q, q, q), stof.attention(q, q, q, WINDOW)])


def _timm() -> tuple[nn.Module, tuple[Tensor, ...]]:
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", num_classes=7), (draw(1, 3, 224, 224),)


def _torchvision() -> tuple[nn.Module, tuple[Tensor, ...]]:
    # A build for another PyTorch raises a RuntimeError.
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    model = models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=7)
    nn.init.normal_(model.heads.head.weight)
    return model, (draw(1, 3, 32, 32),)


def _diffusers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    attention = pytest.importorskip("diffusers.models.attention", exc_type=(ImportError, RuntimeError))
    return attention.BasicTransformerBlock(32, 4, 8), (draw(2, 64, 32),)


@pytest.mark.parametrize("build", [_timm, _torchvision, _diffusers])
def test_models_of_other_libraries(build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
    model, inputs = build()
    with torch.inference_mode():
        want = model.eval()(*inputs)
        with spy() as calls, stof.replace_sdpa():
            torch.testing.assert_close(model(*inputs), want, atol=1e-4, rtol=1e-4)
        assert calls.call_count > 0
        with stof.replace_sdpa(WINDOW):
            windowed = model(*inputs)
        assert (windowed - want).abs().max() > 1e-4
        torch.testing.assert_close(stof.optimize(model, mask=WINDOW)(*inputs), windowed, atol=1e-4, rtol=1e-4)

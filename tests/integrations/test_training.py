"""Models train with stof's attention: gradients equal those of the model's own, and of padded batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stof
from stof import masks
from stof.errors import ArgumentError
from stof.kernels.dropout import Dropout, dense_kept_weights, draw_seed
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

BUILDERS = [models.bert, models.gpt2, models.llama, models.mistral, models.gemma2, models.gpt_oss, models.t5]
# Those that "sdpa" does not compute: their eager attention has a softmax in float32.
EAGER = [models.gemma2, models.gpt_oss]


def training(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model in training mode, without dropout."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob", "dropout_rate"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model.to(dtype).train()


def gradients(model: Any, inputs: dict[str, Tensor], valid: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients of all parameters, of a loss over the valid tokens."""
    model.zero_grad()
    out = model(**inputs)
    tokens = out.logits if "logits" in out else out.last_hidden_state
    valid = inputs["attention_mask"].bool() if valid is None else valid
    (tokens[valid] * torch.linspace(-1, 1, tokens.shape[-1], dtype=tokens.dtype)).sin().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batch(model: Any) -> dict[str, Tensor]:
    inputs = models.batch()
    return inputs | ({"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {})


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        tolerance = {"atol": 1e-9, "rtol": 1e-7} if gradient.dtype == torch.float64 else {"atol": 2e-5, "rtol": 1e-4}
        scale = gradient.abs().max().clamp(min=1.0)
        torch.testing.assert_close(got[name] / scale, gradient / scale, **tolerance, msg=name)


@pytest.mark.parametrize("build", BUILDERS)
def test_gradients_are_those_of_the_models_own_attention(build: Callable[[], Any]) -> None:
    model = training(build(), torch.float32 if build in EAGER else torch.float64)
    model.set_attn_implementation("eager" if build in EAGER else "sdpa")
    inputs = batch(model)
    expected = gradients(model, inputs)
    hf.enable(model)
    assert_equal(gradients(model, inputs), expected)
    if model.supports_gradient_checkpointing and build is not models.gpt_oss:
        model.config.use_cache = False
        models.checkpoint_activations(model)
        assert_equal(gradients(model, inputs), expected)


@pytest.mark.parametrize("build", [models.bert, models.llama])
def test_sparse_masks(build: Callable[[], Any]) -> None:
    """As with the dense mask of the same scores."""
    model = training(build())
    inputs = {"input_ids": torch.randint(1, models.VOCABULARY, (2, 30)), "attention_mask": torch.ones(2, 30).long()}
    window = masks.sliding_window(4, 4)
    keep = (window & masks.causal() if build is models.llama else window).to_dense(30)
    model.set_attn_implementation("sdpa")
    additive = torch.zeros(2, 1, 30, 30, dtype=torch.float64).masked_fill(~keep, torch.finfo(torch.float64).min)
    valid = torch.ones(2, 30, dtype=torch.bool)
    expected = gradients(model, inputs | {"attention_mask": additive}, valid)
    hf.enable(model)
    with hf.sparsify(model, window):
        assert_equal(gradients(model, inputs, valid), expected)


@pytest.mark.parametrize("given", [None, "ones"])
def test_packed_positions_do_not_leak(given: str | None) -> None:
    """`position_ids` that begin anew, with and without a mask of ones, train as the padded batch does."""
    model = training(models.llama())
    inputs = models.batch(lengths=(9, 17, 5))
    valid = inputs["attention_mask"].bool()
    model.set_attn_implementation("sdpa")
    expected = gradients(model, inputs)
    hf.enable(model)
    packed = {
        "input_ids": inputs["input_ids"][valid][None],
        "position_ids": torch.cat([torch.arange(n) for n in (9, 17, 5)])[None],
    }
    if given == "ones":
        packed["attention_mask"] = torch.ones_like(packed["input_ids"])
    got = gradients(model, packed | {"use_cache": False}, torch.ones(1, 31, dtype=torch.bool))  # type: ignore[dict-item]
    assert_equal(got, expected)


def test_packed_batches() -> None:
    model = training(models.bert())
    inputs = models.batch()
    valid = inputs["attention_mask"].bool()
    model.set_attn_implementation("sdpa")
    expected = gradients(model, inputs)
    hf.enable(model)
    packed = hf.pack(**inputs)
    assert_equal(gradients(model, packed.model_inputs(), torch.ones(1, int(valid.sum()), dtype=torch.bool)), expected)


def test_adapters_and_frozen_weights() -> None:
    """Gradients reach what asks for them alone."""
    model = training(models.llama())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name)
    inputs = models.batch()
    model.set_attn_implementation("sdpa")
    expected = gradients(model, inputs)
    hf.enable(model)
    got = gradients(model, inputs)
    assert_equal(got, expected)
    assert set(got) == {name for name, _ in model.named_parameters() if "v_proj" in name}


@pytest.mark.parametrize("build", [models.bert, models.llama, models.gpt2])
def test_attention_dropout(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model's own attention with the same weights dropped, also under gradient checkpointing."""
    p, seeds = 0.25, []

    def drawn(device: torch.device) -> Tensor:
        seeds.append(draw_seed(device))
        return seeds[-1]

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not p or not training:
            return x
        return x * dense_kept_weights(Dropout(p, next(following)), *x.shape) / (1 - p)

    monkeypatch.setattr(importlib.import_module("stof.attention"), "draw_seed", drawn)
    # LLaMA's eager attention has a softmax in float32.
    model = training(build(), torch.float32 if build is models.llama else torch.float64)
    for part in model.modules():
        if type(part).__name__ in ("BertSelfAttention", "LlamaAttention", "GPT2Attention"):
            name = next(n for n in ("attn_dropout", "attention_dropout", "dropout") if hasattr(part, n))
            setattr(part, name, nn.Dropout(p) if isinstance(getattr(part, name), nn.Dropout) else p)
    model.config.use_cache = False
    inputs = batch(model)
    hf.enable(model)
    torch.manual_seed(0)
    got = gradients(model, inputs)
    calls = len(seeds)
    assert calls >= 2
    models.checkpoint_activations(model)
    torch.manual_seed(0)
    assert_equal(gradients(model, inputs), got)
    assert len(seeds) == 3 * calls
    assert all(map(torch.equal, seeds[:calls], seeds[calls : 2 * calls]))
    models.checkpoint_activations(model, False)
    model.set_attn_implementation("eager")
    monkeypatch.setattr(nn.functional, "dropout", drop)
    following = iter(seeds[:calls])
    assert_equal(gradients(model, inputs), got)
    assert next(following, None) is None


def test_attention_dropout_is_off_in_evaluation() -> None:
    model = hf.enable(models.bert(attention_probs_dropout_prob=0.5).eval())
    inputs = models.batch()
    assert torch.equal(model(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks tensors of a second graph for it
@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [models.mistral, models.gemma2])
def test_compiled_models_train_under_windows_by_name(build: Callable[[], Any]) -> None:
    """Each layer under its window, not under a tensor of every score, in two graphs at most."""
    torch.compiler.reset()
    model = training(hf.enable(build()))
    inputs = {"input_ids": models.batch()["input_ids"]}
    valid = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    expected = gradients(model, inputs, valid)
    seen: list[tuple[str, Any]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        nodes = [n for n in graph.graph.nodes if n.target is torch.ops.stof.masked_attention.default]
        seen.extend((node.args[3], node.args[4]) for node in nodes)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        got = gradients(compiled, inputs, valid)
        assert_equal({name.removeprefix("_orig_mod."): gradient for name, gradient in got.items()}, expected)
    assert len(seen) == model.config.num_hidden_layers
    assert all(bias is None for _, bias in seen)
    assert any(f"sliding_window(left={model.config.sliding_window - 1}" in mask for mask, _ in seen), seen


def test_windows_where_the_graph_cannot_break() -> None:
    """Exports evaluate a window at every score; the error of `fullgraph=True` says what to do."""
    torch.compiler.reset()
    model = hf.enable(models.mistral())
    inputs = {"input_ids": models.batch()["input_ids"], "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False)
    torch.testing.assert_close(program.module()(**inputs).logits, model(**inputs).logits)
    with pytest.raises(RuntimeError, match="without fullgraph"):
        torch.compile(model, backend="eager", fullgraph=True)(**inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Inductor and what it imports
def test_optimized_models_train(caplog: pytest.LogCaptureFixture) -> None:
    """Compiled forward and backward under a sparse mask, then fused inference of the same model."""
    model = training(models.llama(), torch.float32)
    window = masks.sliding_window(5)
    inputs = batch(model)
    with hf.sparsify(hf.enable(model), window):
        expected = gradients(model, inputs)
    with caplog.at_level("INFO", logger="stof"):
        compiled = stof.optimize(model, mask=window)
    assert "training mode" in caplog.text
    got = gradients(compiled, inputs)
    assert_equal({name.removeprefix("_orig_mod."): gradient for name, gradient in got.items()}, expected)
    with torch.inference_mode():
        trained = model.eval()(**inputs).logits
        torch.testing.assert_close(stof.optimize(model, mask=window)(**inputs).logits, trained, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"cuda_graphs": "whole"}])
def test_options_of_inference_are_refused_in_training_mode(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(options))}: options of fused inference.*training mode"):
        stof.optimize(training(models.llama(), torch.float32), **options)

"""Models that do not keep packed sequences apart are refused; the check disturbs nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stof.errors import UnsupportedError
from tests.integrations import models
from tests.test_recomputation import Operators

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("stof.integrations.transformers")
packing_check = pytest.importorskip("stof.integrations.transformers.packing_check")

_SMALL: dict[str, Any] = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HYBRID = _SMALL | {"num_key_value_heads": 2}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_BART: dict[str, Any] = {
    "vocab_size": models.VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}


def _built(name: str, **config: Any) -> Any:
    """`XModel` of `XConfig`, with the weights of its initialization: a leak may be small."""
    kind = getattr(transformers, f"{name}Model")
    return kind(getattr(transformers, f"{name}Config")(**config)).eval()


REFUSED: dict[str, Callable[[], Any]] = {
    "LFM2": lambda: _built("Lfm2", **_HYBRID, layer_types=["conv", "full_attention"]),
    "MobileBERT": lambda: _built("MobileBert", **_SMALL, embedding_size=16, intra_bottleneck_size=32),
    "Jamba": lambda: _built("Jamba", **_HYBRID, **_JAMBA),
    "Qwen3-Next": lambda: _built("Qwen3Next", **_HYBRID, **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=16),
    "BART": lambda: _built("Bart", **_BART),
    "BART's encoder": lambda: _built("Bart", **_BART).get_encoder(),
}
SERVED: dict[str, tuple[Callable[[], Any], int]] = {
    "ModernBERT": (
        lambda: _built(
            "ModernBert", **_SMALL, global_attn_every_n_layers=2, local_attention=6, cls_token_id=1, sep_token_id=2
        ),
        0,
    ),
    "RoBERTa": (lambda: _built("Roberta", **_SMALL | {"pad_token_id": 1}), 2),
    "Gemma": (lambda: _built("Gemma", **_HYBRID, head_dim=8), 0),
    "Qwen3 with experts": (lambda: _built("Qwen3Moe", **_HYBRID, **_EXPERTS, head_dim=8), 0),
    "T5's encoder": (lambda: models.t5().encoder, 0),
    "a head": (lambda: models.llama(), 0),
}


def traced(message: str) -> str:
    """A message of stof's as `fullgraph=True` shows it: PyTorch 2.11 names the error alone."""
    return message if torch.__version__ >= "2.12" else "UnsupportedError"


def _out(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_mix_tokens_or_count_places_are_refused(name: str) -> None:
    model = hf.enable(REFUSED[name]())
    inputs = models.batch(lengths=(7, 12))
    packed = hf.pack(**inputs)
    why = "place in the row" if "BART" in name else "change the outputs of another"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=rf"cannot run packed sequences.*{why}.*Pass the padded batch"):
            _out(model, packed.model_inputs())
    _out(model, inputs)


@pytest.mark.parametrize("name", SERVED)
def test_models_that_keep_sequences_apart(name: str) -> None:
    build, first_position = SERVED[name]
    model = hf.enable(build())
    inputs = models.batch(lengths=(9, 23, 1, 14))
    valid = inputs["attention_mask"].bool()
    inputs["input_ids"][~valid] = model.config.pad_token_id
    for max_tokens in (None, 24):
        packed = hf.pack(**inputs, max_tokens=max_tokens, first_position=first_position)
        got = packed.unpack(_out(model, packed.model_inputs()))
        torch.testing.assert_close(got[valid], _out(model, inputs)[valid], atol=2e-5, rtol=1e-5)


# Position of the first token, None where only distances of positions matter.
FIRST_POSITIONS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "RoBERTa": (lambda: _built("Roberta", **_SMALL | {"pad_token_id": 1}), 2),
    "XLM-R with another padding id": (lambda: _built("XLMRoberta", **_SMALL | {"pad_token_id": 4}), 5),
    "a head": (
        lambda: transformers.CamembertForSequenceClassification(transformers.CamembertConfig(**_SMALL)).eval(),
        1,
    ),
    "BERT": (models.bert, 0),
    "GPT-2": (models.gpt2, 0),
    "OPT": (lambda: _built("OPT", **_SMALL, ffn_dim=48, word_embed_proj_dim=32), 0),
    "rotary": (models.llama, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FIRST_POSITIONS)
def test_positions_count_from_where_the_model_does(name: str, dtype: torch.dtype) -> None:
    """One model for all numbers: a number that passed vouches for no other."""
    build, expected = FIRST_POSITIONS[name]
    model, inputs = hf.enable(build().to(dtype)), models.batch(lengths=(7, 12))
    order = [5, 0, 2, 1]
    for first_position in [*order, *order] if expected is None else [expected, *order, expected]:
        packed = hf.pack(**inputs, first_position=first_position)
        if expected in (None, first_position):
            _out(model, packed.model_inputs())
            continue
        advice = rf"count from {first_position}, as pack\(\) wrote.*Give pack\(\).*first_position={expected}$"
        with pytest.raises(UnsupportedError, match=advice):
            _out(model, packed.model_inputs())


@pytest.mark.parametrize("embedded", [False, True])
def test_compiled_models_are_checked_for_each_first_position(embedded: bool) -> None:
    torch.compiler.reset()
    model = hf.enable(SERVED["RoBERTa"][0]())
    compiled = torch.compile(model, backend="eager")
    inputs = models.batch(lengths=(7, 12))
    for first_position in (2, 0, 2, 3, 2):
        call = hf.pack(**inputs, first_position=first_position).model_inputs()
        if embedded:
            call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids")).detach()
        if first_position == 2:
            torch.testing.assert_close(_out(compiled, call), _out(model, call))
            continue
        with pytest.raises(UnsupportedError, match="first_position=2"):
            _out(compiled, call)


class Inserted(nn.Module):
    """A layer of a model, and something after it."""

    def __init__(self, layer: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = layer, then

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(hidden, *args, **kwargs)
        return (self.then(out[0]), *out[1:]) if isinstance(out, tuple) else self.then(out)


def _limited(x: Tensor, capacity: int = 5) -> Tensor:
    """An expert for positive tokens, with room for few of them."""
    to_expert = x[..., :1] > 0
    return torch.where(to_expert & (to_expert.cumsum(1) <= capacity), x.roll(1, -1), x)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "previous token": lambda x: x + 1e-6 * x.roll(1, 1),
    "next token": lambda x: x + 1e-6 * x.roll(-1, 1),
    "far token": lambda x: x + 1e-6 * x.roll(9, 1),
    "running sum": lambda x: x + 1e-6 * x.cumsum(1),
    "normalized over tokens": lambda x: x - 1e-6 * x.mean(1, keepdim=True),
    "maximum": lambda x: x + 1e-6 * x.amax(1, keepdim=True),
    "sorted": lambda x: x.sort(1).values,
    "place": lambda x: x + 0.02 * torch.arange(x.shape[1])[:, None],
    "row length": lambda x: torch.cat([x[:, :-1], x[:, -1:].roll(1, -1)], 1),
    "capacity": _limited,
}
KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "features": lambda x: x.roll(1, -1) + 1,
    "normalized": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "best features": lambda x: x.topk(8, -1).values.sum(-1, keepdim=True) + x,
}


def _with_inserted(then: Callable[[Tensor], Tensor], build: Callable[[], Any] = models.llama) -> nn.Module:
    model = build()
    layers = model.encoder.layer if build is models.bert else model.model.layers
    at = random.randrange(len(layers))
    layers[at] = Inserted(layers[at], then)
    return model


@pytest.mark.parametrize("build", [models.bert, models.llama])
@pytest.mark.parametrize("name", [*MIXING, *KEEPING])
def test_layers_are_judged_by_what_they_do(name: str, build: Callable[[], Any]) -> None:
    model = hf.enable(_with_inserted((MIXING | KEEPING)[name], build))
    inputs = models.batch(lengths=(20, 30, 14))
    packed = hf.pack(**inputs)
    if name in MIXING:
        with pytest.raises(UnsupportedError, match="cannot run packed sequences"):
            _out(model, packed.model_inputs())
    else:
        valid = inputs["attention_mask"].bool()
        got = packed.unpack(_out(model, packed.model_inputs()))
        torch.testing.assert_close(got[valid], _out(model, inputs)[valid], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="its products carry NaN between rows on AMX"),
        ),
    ],
)
def test_rounding_is_no_leak(dtype: torch.dtype) -> None:
    model = hf.enable(models.llama(num_hidden_layers=8)).to(dtype)
    _out(model, hf.pack(**models.batch(lengths=(20, 30, 14))).model_inputs())
    with pytest.raises(UnsupportedError, match="place in the row"):
        _out(hf.enable(REFUSED["BART's encoder"]()).to(dtype), hf.pack(**models.batch()).model_inputs())


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Part and row length of each check that ran."""
    seen: list[tuple[str, int]] = []
    run = packing_check._run

    def recorded(module: nn.Module, arguments: Any, rows: int, width: int) -> Any:
        seen.append((type(module).__name__, width))
        return run(module, arguments, rows, width)

    monkeypatch.setattr(packing_check, "_run", recorded)
    return seen


def test_a_model_is_checked_once_for_a_kind_of_call(rows: list[tuple[str, int]]) -> None:
    model = hf.enable(models.llama())
    packed = hf.pack(**models.batch(lengths=(7, 12)))
    inputs = packed.model_inputs()
    for _ in range(3):
        _out(model, inputs)
    assert rows == [("LlamaForCausalLM", 16)]
    _out(copy.deepcopy(model), inputs)
    _out(model, hf.pack(**models.batch(lengths=(6, 13))).model_inputs())
    assert len(rows) == 1
    _out(model, hf.pack(**models.batch(lengths=(30, 13))).model_inputs())  # a longer row may fill layers up
    embedded = inputs | {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "input_ids": None}
    _out(model, embedded)
    assert [width for _, width in rows] == [16, 32, 16]
    # Another kind of call: positions are those of places now.
    with pytest.raises(UnsupportedError, match="position_ids are left out"):
        _out(hf.enable(models.gpt2()), {k: v for k, v in inputs.items() if k != "position_ids"})


def test_enabling_a_model_has_it_checked_again() -> None:
    model = hf.enable(models.llama())
    inputs = hf.pack(**models.batch(lengths=(7, 12))).model_inputs()
    _out(model, inputs)
    model.model.layers[0] = Inserted(model.model.layers[0], MIXING["previous token"])
    hf.enable(model)
    with pytest.raises(UnsupportedError, match="cannot run packed sequences"):
        _out(model, inputs)


def test_the_check_disturbs_nothing() -> None:
    model = hf.enable(models.llama()).train()
    model.model.layers[1].eval()
    training = [part.training for part in model.modules()]
    seen: list[tuple[int, ...]] = []
    hooks = [
        model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape))),
        model.model.norm.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape))),
    ]
    inputs = hf.pack(**models.batch(lengths=(7, 12))).model_inputs()
    cache = transformers.DynamicCache()
    state = torch.random.get_rng_state()
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True, past_key_values=cache, use_cache=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [part.training for part in model.modules()] == training
    assert seen == [(1, 19, 32)] * 2
    assert len(out.hidden_states) == 3
    assert out.past_key_values is cache
    assert cache.get_seq_length() == 19
    assert out.logits.isfinite().all()
    for handle in hooks:
        handle.remove()
    _out(model, inputs)
    assert len(seen) == 2  # handles remove hooks that were set aside for the check


def test_gradients_are_not_asked_for_by_the_check() -> None:
    """The call itself is refused: there is no backward; but not in the check."""
    model = hf.enable(models.bert())
    inputs = hf.pack(**models.batch(lengths=(7, 12))).model_inputs()
    with torch.inference_mode():
        first = model(**inputs)[0]
    torch.testing.assert_close(first, _out(model, inputs))
    assert all(p.grad is None for p in model.parameters())


def test_compiled_models_are_checked_while_they_are_traced() -> None:
    inputs = hf.pack(**models.batch(lengths=(7, 12))).model_inputs()
    for fullgraph in (False, True):
        torch.compiler.reset()
        model = hf.enable(_with_inserted(MIXING["previous token"]))
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        error = torch._dynamo.exc.Unsupported if fullgraph else UnsupportedError
        message = "change the outputs of another"
        with pytest.raises(error, match=traced(message) if fullgraph else message):
            _out(compiled, inputs)


def test_models_within_models() -> None:
    """A head may return nothing for each token, or mix tokens itself."""
    inputs = hf.pack(**models.batch(lengths=(7, 12))).model_inputs()
    config = transformers.BertConfig(**_SMALL)
    assert _out(hf.enable(transformers.BertForSequenceClassification(config).eval()), inputs).shape == (1, 2)
    assert _out(hf.enable(transformers.BertForQuestionAnswering(config).eval()), inputs).shape == (1, 19)
    model = transformers.BertForTokenClassification(config).eval()
    model.classifier = Inserted(model.classifier, MIXING["next token"])
    with pytest.raises(UnsupportedError, match="BertForTokenClassification cannot run packed"):
        _out(hf.enable(model), inputs)


def test_what_cannot_be_checked_is_refused() -> None:
    inputs = hf.pack(**models.batch(lengths=(7, 12))).model_inputs()
    model = hf.enable(models.bert())
    with pytest.raises(UnsupportedError, match="call the model itself"):
        model.forward(**inputs)
    with pytest.raises(UnsupportedError, match="call the model itself"):
        model.encoder(model.embeddings(inputs["input_ids"]), attention_mask=inputs["attention_mask"])
    embeddings = model.embeddings.word_embeddings
    model.embeddings.word_embeddings = nn.Embedding(61, 32)
    model.get_input_embeddings = lambda: embeddings
    with pytest.raises(UnsupportedError, match="do not depend on its input embeddings"):
        _out(model, inputs)


def test_decoders_that_read_packed_states() -> None:
    """The encoder's mask keeps sequences apart; the decoder's own attention needs one too."""
    model, inputs = hf.enable(models.t5()), models.batch(lengths=(7, 12))
    packed = hf.pack(**inputs)
    call = {k: v for k, v in packed.model_inputs().items() if k != "position_ids"}
    call["decoder_input_ids"] = packed.input_ids
    with pytest.raises(UnsupportedError, match="attention without the packed mask"):
        _out(model, call)
    got = packed.unpack(_out(model, call | {"decoder_attention_mask": call["attention_mask"]}))
    ids, valid = inputs["input_ids"], inputs["attention_mask"]
    want = _out(model, inputs | {"decoder_input_ids": ids, "decoder_attention_mask": valid})
    torch.testing.assert_close(got[valid.bool()], want[valid.bool()], atol=2e-4, rtol=1e-5)


def test_the_check_leaves_no_casts_to_autocast() -> None:
    """Selective checkpointing counts casts: a first call makes as many as the next."""
    model = hf.enable(models.llama())
    batch = hf.pack(torch.randint(3, 30, (2, 9)), torch.ones(2, 9, dtype=torch.int64))
    casts = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), Operators() as operators:
            model(**batch.model_inputs())
        casts.append(operators.seen.count(torch.ops.aten._to_copy.default))
    assert casts[0] == casts[1] > 0

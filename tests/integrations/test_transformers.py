"""`attn_implementation="stof"` against transformers' own attention, on small random models."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stof
from stof import masks
from stof.errors import ArgumentError, MissingDependencyError, ShapeError, UnsupportedError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")
from transformers import CompileConfig, OPTConfig, OPTModel, StaticCache, masking_utils  # noqa: E402

SIDES = ("right", "left")
DECODERS: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (models.gpt2, "sdpa"),
    "llama": (models.llama, "sdpa"),
    "mistral": (models.mistral, "sdpa"),
    "gemma2": (models.gemma2, "eager"),  # sdpa ignores the softcap
    "gpt_oss": (models.gpt_oss, "eager"),  # sdpa refuses sinks
}
DENSE_TWINS = pytest.mark.parametrize("name", list(DECODERS))


def set_implementation(model: Any, name: str) -> None:
    """Also on parts that hold a copy of the configuration, and only if it takes."""
    for part in model.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation(name)
        if hasattr(part, "config"):
            assert part.config._attn_implementation == name


def both(model: Any, reference: str, call: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    """What the model computes with stof and with transformers' own attention."""
    out = []
    for implementation in ("stof", reference):
        set_implementation(model, implementation)
        with torch.no_grad():
            out.append(call(model))
    return out[0], out[1]


def close(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_bert(side: str) -> None:
    inputs = models.batch(side)
    got, want = both(models.bert(), "sdpa", lambda m: m(**inputs).last_hidden_state)
    close(got, want)


def test_bert_without_an_attention_mask() -> None:
    ids = models.batch()["input_ids"]
    got, want = both(models.bert(), "sdpa", lambda m: m(ids).last_hidden_state)
    close(got, want)


@pytest.mark.parametrize("side", SIDES)
@DENSE_TWINS
def test_decoders(name: str, side: str) -> None:
    build, reference = DECODERS[name]
    inputs = models.batch(side)
    got, want = both(build(), reference, lambda m: m(**inputs).logits)
    close(got[inputs["attention_mask"].bool()], want[inputs["attention_mask"].bool()], atol=3e-5)
    assert not got.isnan().any()


# Padded on the right, the window of the last prompt position holds padding alone, over which eager attention averages.
@pytest.mark.parametrize(
    ("name", "side"), [(n, s) for n in DECODERS for s in SIDES if s == "left" or n not in ("gemma2", "gpt_oss")]
)
def test_greedy_generation(name: str, side: str) -> None:
    build, reference = DECODERS[name]
    inputs = models.batch(side)
    got, want = both(build(), reference, lambda m: m.generate(**inputs, max_new_tokens=10, do_sample=False))
    assert torch.equal(got, want)


def test_cached_steps_give_the_logits_of_the_whole_sequence() -> None:
    inputs = models.batch("left", (12, 7))
    model = models.llama()
    model.set_attn_implementation("stof")
    with torch.no_grad():
        whole = model(**inputs).logits
        cache, parts = None, []
        for start, stop in ((0, 5), (5, 9), (9, 10), (10, 12)):  # a prompt in chunks, then single tokens
            out = model(
                inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            parts.append(out.logits)
    valid = inputs["attention_mask"].bool()
    close(torch.cat(parts, 1)[valid], whole[valid])


@DENSE_TWINS
def test_static_cache(name: str) -> None:
    inputs = models.batch("left")
    options = {"max_new_tokens": 10, "do_sample": False, "disable_compile": True}
    got, want = both(
        DECODERS[name][0](), DECODERS[name][1], lambda m: m.generate(**inputs, cache_implementation="static", **options)
    )
    assert torch.equal(got, want)


def test_decoding_builds_no_plan_per_step() -> None:
    model = models.llama()
    model.set_attn_implementation("stof")
    model.generate(**models.batch("left"), max_new_tokens=12, do_sample=False)
    assert stof.plan_cache.info().misses <= 1  # the prompt


@pytest.mark.parametrize("side", SIDES)
def test_t5(side: str) -> None:
    inputs = models.batch(side) | {"decoder_input_ids": models.batch(lengths=(11, 11, 11))["input_ids"]}
    model = models.t5()
    got, want = both(model, "sdpa", lambda m: m(**inputs).logits)
    close(got, want, atol=2e-4)
    changed = dict(inputs, attention_mask=torch.ones_like(inputs["attention_mask"]))
    other, _ = both(model, "sdpa", lambda m: m(**changed).logits)
    assert (other - want).abs().max() > 1e-2  # cross-attention sees the padding mask


def test_t5_generation() -> None:
    inputs = models.batch()
    got, want = both(models.t5(), "sdpa", lambda m: m.generate(**inputs, max_new_tokens=8, do_sample=False))
    assert torch.equal(got, want)


def test_vit() -> None:
    pixels = torch.randn(2, 3, 24, 24)
    got, want = both(models.vit(), "sdpa", lambda m: m(pixels).last_hidden_state)
    close(got, want)


def test_enable_reaches_copied_configurations() -> None:
    model = models.t5()
    assert hf.enable(model) is model
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {"stof"}
    with pytest.raises(UnsupportedError, match="Linear"):
        hf.enable(nn.Linear(2, 2))


def test_enabling_twice_hooks_once() -> None:
    model = hf.enable(models.llama())
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    assert sum(hooks) > 0
    hf.enable(model)
    assert [len(part._forward_pre_hooks) for part in model.modules()] == hooks


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_disable_gives_back_what_each_part_had(before: str) -> None:
    model = models.t5()
    for part in (model, model.encoder, model.decoder):
        part.set_attn_implementation(before)
    model.encoder.set_attn_implementation("eager")
    inputs = models.batch()
    inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        expected = model(**inputs).logits
    kinds = [part.config._attn_implementation for part in (model, model.encoder, model.decoder)]
    assert kinds == [before, "eager", before]
    for _ in range(2):
        hf.enable(hf.enable(model))
        assert hf.disable(model) is model
        assert [part.config._attn_implementation for part in (model, model.encoder, model.decoder)] == kinds
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)
    model(**inputs).logits.sum().backward()


def test_disable_where_stof_was_from_the_start() -> None:
    from transformers import AutoModel

    model = AutoModel.from_config(models.bert().config, attn_implementation="stof")
    assert hf.disable(model).config._attn_implementation == "sdpa"
    assert hf.disable(model).config._attn_implementation == "sdpa"
    assert isinstance(hf.disable(nn.Linear(2, 2)), nn.Linear)


def test_from_config() -> None:
    from transformers import AutoModel

    config = models.bert().config
    assert AutoModel.from_config(config, attn_implementation="stof").config._attn_implementation == "stof"


def test_layers_share_one_plan_and_equal_padding_reuses_it() -> None:
    model = models.bert(num_hidden_layers=4)
    model.set_attn_implementation("stof")
    inputs = models.batch()
    with torch.no_grad():
        model(**inputs)
        assert stof.plan_cache.info().misses == 1
        model(**inputs)
    assert stof.plan_cache.info().misses == 1


def test_empty_sequences_and_padding_with_holes() -> None:
    inputs = models.batch(lengths=(9, 4, 6))
    inputs["attention_mask"][1] = 0
    inputs["attention_mask"][2, 1:3] = 0
    valid = inputs["attention_mask"].bool()
    for build in (models.bert, lambda: models.llama().model):
        got, want = both(build(), "sdpa", lambda m: m(**inputs).last_hidden_state)
        close(got[valid], want[valid])
        assert not got.isnan().any()


def test_custom_dense_masks() -> None:
    keep = torch.rand(3, 1, 23, 23) < 0.4
    keep |= torch.eye(23, dtype=torch.bool)
    added = torch.zeros(3, 1, 23, 23).masked_fill(~keep, torch.finfo(torch.float32).min)
    ids = models.batch()["input_ids"]
    for mask in (keep, added, keep[:1, :, :, :], keep.transpose(2, 3)):
        got, want = both(models.bert(), "sdpa", lambda m, mask=mask: m(ids, attention_mask=mask).last_hidden_state)
        close(got, want)


def test_packed_position_ids_of_transformers() -> None:
    ids = models.batch()["input_ids"]
    positions = torch.cat([torch.arange(10), torch.arange(13)]).expand(3, -1)
    call = {"position_ids": positions, "use_cache": False}
    got, want = both(models.llama(), "sdpa", lambda m: m(ids, **call).logits)
    close(got, want)
    assert "documents" in _mask_seen(models.llama(), lambda m: m(ids, **call))


def _mask_seen(model: Any, call: Callable[[Any], Any]) -> str:
    """repr of the mask the layers of a model received."""
    model.set_attn_implementation("stof")
    seen: list[object] = []

    def note(module: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        seen.append(kwargs.get("attention_mask"))

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if hasattr(m, "is_causal")]
    with torch.no_grad():
        call(model)
    for hook in hooks:
        hook.remove()
    assert isinstance(seen[0], hf.ModelMask)
    return repr(seen[0].mask)


def test_masks_are_read_by_name() -> None:
    inputs = models.batch("left")
    assert _mask_seen(models.llama(), lambda m: m(**inputs)) == "causal() & ~padding(lengths=[0, 14, 22])"
    assert _mask_seen(models.mistral(), lambda m: m(inputs["input_ids"])) == "sliding_window(left=5, right=0)"
    right = models.batch("right")
    assert _mask_seen(models.llama(), lambda m: m(**right)) == "causal() & padding(lengths=[23, 9, 1])"


ids_two_documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2]])


@pytest.mark.parametrize(
    "fn",
    [
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.sliding_window_causal_mask_function(1),
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3])),
        masking_utils.and_masks(
            masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids_two_documents)
        ),
        masking_utils.or_masks(
            masking_utils.sliding_window_causal_mask_function(2),
            masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, kv: kv < 2),
        ),
        masking_utils.or_masks(
            masking_utils.causal_mask_function, masking_utils.blockwise_overlay(ids_two_documents - 1)
        ),
    ],
)
@pytest.mark.parametrize("offsets", [(0, 0, 11, 11), (4, 0, 3, 11), (6, 4, 2, 5), (10, 0, 1, 11), (5, 0, 1, 11)])
def test_every_mask_function_means_what_it_means_to_sdpa(fn: Callable[..., Any], offsets: tuple[int, ...]) -> None:
    q_offset, kv_offset, q_length, kv_length = offsets
    pads = torch.ones(2, q_offset + q_length, dtype=torch.bool)
    pads[1, :3] = False
    for attention_mask in (None, pads):
        arguments: dict[str, Any] = {
            "batch_size": 2,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": fn,
            "attention_mask": attention_mask,
            "allow_is_causal_skip": False,  # sdpa's shortcut to None; stof always makes a mask
        }
        want = masking_utils.sdpa_mask(**arguments)
        made = hf.make_mask(**arguments)
        got = made.mask.to_dense(q_length, kv_length, batch=2)
        got = got if made.keep is None else got & made.keep
        assert torch.equal(got.expand_as(want), want)


def test_a_reader_that_disagrees_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from stof.integrations.transformers import mask_recognition

    window = masking_utils.sliding_window_overlay(3)
    assert mask_recognition.recognize_mask(window, 8, 8, 0, 0) is not None
    monkeypatch.setitem(mask_recognition._READERS, window.__code__, lambda held, whole: masks.sliding_window(7))
    monkeypatch.setattr(mask_recognition, "_TRUSTED", set(mask_recognition._TRUSTED))
    with pytest.warns(RuntimeWarning, match=r"changed sliding_window_overlay"):
        mask_recognition._check_readers()
    assert mask_recognition.recognize_mask(window, 8, 8, 0, 0) is None


def test_is_causal_of_a_call() -> None:
    model, ids = models.llama(), models.batch()["input_ids"]
    got, want = both(model, "sdpa", lambda m: m(ids, is_causal=False).logits)
    close(got, want)
    causal, _ = both(model, "sdpa", lambda m: m(ids).logits)
    assert (causal - want).abs().max() > 1e-2


def _attend(**changes: Any) -> Tensor:
    module = nn.Module()
    module.is_causal = changes.pop("module_is_causal", False)  # type: ignore[assignment]
    torch.manual_seed(3)
    call = {"query": torch.randn(2, 4, 6, 8), "key": torch.randn(2, 2, 6, 8), "value": torch.randn(2, 2, 6, 8)}
    return hf.attention_forward(module, **call | {"attention_mask": None} | changes)[0]


def test_arguments_of_the_layer_are_honoured() -> None:
    plain, causal = _attend(), _attend(module_is_causal=True)
    close(_attend(is_causal=True), causal)
    close(_attend(module_is_causal=True, is_causal=False), plain)
    for changes in ({"scaling": 3.0}, {"softcap": 0.1}, {"s_aux": torch.ones(4)}, {"module_is_causal": True}):
        assert (_attend(**changes) - plain).abs().max() > 1e-3
    bias = torch.randn(1, 4, 6, 6)
    keep = (torch.rand(2, 1, 6, 6) < 0.5) | torch.eye(6, dtype=torch.bool)
    want = _attend(attention_mask=bias.masked_fill(~keep, torch.finfo(torch.float32).min))
    close(_attend(attention_mask=keep, position_bias=bias), want)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 4, 1, 6), (2, 4, 1, 6)], ids=str)
def test_one_query_under_a_mask_tensor(shape: tuple[int, ...]) -> None:
    call = {"query": torch.randn(2, 4, 1, 8), "key": torch.randn(2, 4, 6, 8), "value": torch.randn(2, 4, 6, 8)}
    keep = (torch.rand(shape) < 0.5) | (torch.arange(shape[-1]) == 0)
    want = nn.functional.scaled_dot_product_attention(*call.values(), attn_mask=keep.expand(2, 4, 1, 6))
    close(_attend(attention_mask=keep, **call), want.transpose(1, 2))


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="from 0 to below 1"):
        _attend(dropout=1.1)
    with pytest.raises(UnsupportedError, match="eager"):
        _attend(output_attentions=True)
    with pytest.raises(ShapeError, match="heads or 1"):
        _attend(attention_mask=torch.ones(2, 6, dtype=torch.bool))
    made = hf.make_mask(2, 5, 5, mask_function=masking_utils.bidirectional_mask_function)
    with pytest.raises(ShapeError, match="5 queries and 5 keys"):
        _attend(attention_mask=made)


def test_a_model_mask_is_no_tensor_and_says_so() -> None:
    made = hf.make_mask(2, 5, 5)
    assert made.ndim == 4
    assert made.shape == (2, 1, 5, 5)
    for misuse in (lambda: made[:, :, 0], lambda: made + 1, lambda: torch.ones(5) * made, lambda: torch.cat([made])):
        with pytest.raises(UnsupportedError, match="set_attn_implementation"):
            misuse()
    with pytest.raises(AttributeError, match=r"asked for \.sum"):
        made.sum()


@pytest.fixture
def _fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "sparse", [pytest.param(None, marks=pytest.mark.slow), "longformer(window=2, global_tokens=1)"]
)
def test_compiled_bert_is_one_graph(sparse: str | None) -> None:
    model = models.bert()
    model.set_attn_implementation("stof")
    hf.sparsify(model, sparse)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    right, left = models.batch(), models.batch("left")
    with torch.no_grad():
        # Another batch size makes the compiler try symbolic sizes.
        for inputs in (right, left, {"input_ids": right["input_ids"]}, models.batch(lengths=(7, 9))):
            if inputs is left and sparse is not None:  # where a sequence begins is not known
                with pytest.raises(RuntimeError, match="padding on the left"):
                    compiled(**inputs)
                continue
            got, want = compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state
            close(got, want)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_decoder_is_one_graph() -> None:
    for build in (models.llama, models.mistral):
        model = build()
        model.set_attn_implementation("stof")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        inputs = models.batch("left")
        valid = inputs["attention_mask"].bool()
        with torch.no_grad():
            got, want = compiled(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits
        close(got[valid], want[valid], atol=3e-5)


def graphs_made() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("_fresh_compiler")
@DENSE_TWINS
def test_compiled_generation_with_a_static_cache(name: str) -> None:
    """One graph for all tokens of all calls; two with windows, whose caches count tokens in an int."""
    build, reference = DECODERS[name]
    model = build()
    compiling = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_logits": True, "cache_implementation": "static"}
    for lengths in ((7, 4, 1), (7, 7, 6)):
        inputs = models.batch("left", lengths)
        set_implementation(model, reference)
        want = model.generate(**inputs, **options, disable_compile=True)
        set_implementation(model, "stof")
        before = graphs_made()
        got = model.generate(**inputs, **options, compile_config=compiling)
        assert torch.equal(got.sequences, want.sequences)
        for step, expected in zip(got.logits, want.logits, strict=True):
            close(step, expected, atol=3e-5)
        windowed = getattr(model.config, "sliding_window", None) is not None
        assert graphs_made() - before == (0 if lengths == (7, 7, 6) else 2 if windowed else 1)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_steps_with_a_static_cache(name: str) -> None:
    """Prompts in chunks and single tokens of a model that is compiled as a whole: a graph for either, none for more."""
    model = DECODERS[name][0]()
    inputs = models.batch("left", (12, 7))
    ids, valid = inputs["input_ids"], inputs["attention_mask"].bool()
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=places).logits
    model.set_attn_implementation("stof")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for attempt in range(2):
        cache = StaticCache(model.config, 12)
        cache.early_initialization(2, cache_heads(model), 8, torch.float32, torch.device("cpu"))
        for start, stop in ((0, 4), (4, 8), *((step, step + 1) for step in range(8, 12))):
            at = slice(start, stop)
            fresh = attempt == 0 and start in (0, 8)
            with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=not fresh):
                out = compiled(
                    ids[:, at], attention_mask=valid, position_ids=places[:, at], past_key_values=cache, use_cache=True
                )
            close(out.logits[valid[:, at]], whole[:, at][valid[:, at]], atol=3e-5)


def cache_heads(model: Any) -> int:
    return getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)


def test_missing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stof.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install --upgrade transformers"):
        __import__("stof.integrations.transformers")


def test_import_stof_does_not_import_transformers() -> None:
    code = "import sys, stof, stof.integrations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compiled_models_see_whole_sequences_as_such() -> None:
    """transformers makes positions itself and then looks for packed sequences in them, which compiled code cannot."""
    model = hf.enable(models.llama())
    ids = torch.randint(1, 30, (2, 24))
    called: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        called.extend(n for n in graph.graph.nodes if n.target is torch.ops.stof.masked_attention.default)
        return graph.forward

    with torch.no_grad():
        eager = model(ids)[0]
        compiled = torch.compile(model, backend=backend, fullgraph=True)(ids)[0]
        padded = model(ids, attention_mask=torch.ones_like(ids))[0]
    assert [(node.args[3], node.args[4]) for node in called] == [("causal()", None)] * model.config.num_hidden_layers
    close(compiled, eager)
    close(padded, eager)
    model.set_attn_implementation("sdpa")  # the hook must not stand in another implementation's way
    with torch.no_grad():
        close(model(ids)[0], eager)


def test_models_that_compute_with_their_mask_are_given_none() -> None:
    """OPT counts positions by it; a mask in its place would end in an error."""
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = OPTModel(OPTConfig(**small, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)).eval()
    ids = torch.randint(4, 60, (2, 9))
    with torch.no_grad():
        expected = model(ids)[0]
        hf.enable(model)
        close(model(ids)[0], expected)
        torch._dynamo.reset()
        close(torch.compile(model, backend="eager")(ids)[0], expected)


@pytest.mark.parametrize("written", [False, True], ids=["deep", "pickled"])
def test_copies_of_sparsified_models(written: bool) -> None:
    """They carry their masks and the hooks that guard them; neither model's are the other's."""
    model = hf.enable(models.bert())
    ids = torch.randint(1, 30, (2, 24))
    keep = torch.rand(24, 24) < 0.5
    with torch.no_grad():
        plain = model(ids)[0]
        sparse = hf.sparsify(model, masks.from_dense(keep) | masks.sliding_window(1))
        expected = model(ids)[0]
        other = pickle.loads(pickle.dumps(model)) if written else copy.deepcopy(model)
        keep.fill_(True)
        close(other(ids)[0], expected)
        sparse.remove()
        close(model(ids)[0], plain)
        close(other(ids)[0], expected)
        other.set_attn_implementation("sdpa")
        with pytest.raises(UnsupportedError, match="another attn_implementation"):
            other(ids)
        hf.sparsify(other, None)
        close(other(ids)[0], plain)

"""Positions that begin anew within a row keep sequences apart, whatever the attention mask says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import stof
from stof import masks
from stof.errors import UnsupportedError
from tests.integrations import models
from tests.integrations.test_packing_check import REFUSED, _out, traced

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("stof.integrations.transformers")
sequence_numbers = pytest.importorskip("stof.integrations.transformers.packed_calls").sequence_numbers

WIDTH = 24
BUILDS: dict[str, Callable[[], Any]] = {
    "bert": models.bert,
    "gpt2": models.gpt2,
    "llama": models.llama,
    "mistral": models.mistral,
    "gemma2": models.gemma2,
}


def _lengths() -> list[int]:
    """Random lengths of two sequences or more that fill a row."""
    cuts = sorted(random.sample(range(1, WIDTH), random.randint(1, 4)))
    return [b - a for a, b in itertools.pairwise([0, *cuts, WIDTH])]


def _call(rows: list[list[int]], mask: str) -> dict[str, Any]:
    """A batch of packed rows; with "padding", the last sequence of each row is padding."""
    ids = torch.randint(1, models.VOCABULARY, (len(rows), WIDTH))
    call = {"input_ids": ids, "position_ids": torch.tensor([[p for n in row for p in range(n)] for row in rows])}
    if mask == "ones":
        call["attention_mask"] = torch.ones_like(ids)
    if mask == "padding":
        call["attention_mask"] = torch.tensor([[1] * (WIDTH - row[-1]) + [0] * row[-1] for row in rows])
    return call


def _alone(model: Any, call: dict[str, Any], rows: list[list[int]]) -> Tensor:
    """Outputs of each sequence alone."""
    tokens = [ids.split(row) for ids, row in zip(call["input_ids"], rows, strict=True)]
    return torch.stack([torch.cat([_out(model, {"input_ids": part[None]})[0] for part in row]) for row in tokens])


@pytest.mark.parametrize("mask", ["none", "ones", "padding"])
@pytest.mark.parametrize("name", BUILDS)
def test_sequences_are_kept_apart(name: str, mask: str) -> None:
    model = hf.enable(BUILDS[name]())
    rows = [_lengths() for _ in range(random.randint(1, 3))]
    call = _call(rows, mask)
    want = _alone(model, call, rows)
    valid = call.get("attention_mask", torch.ones(len(rows), WIDTH)).bool()
    for more in ({}, {"use_cache": False}):
        torch.testing.assert_close(_out(model, call | more)[valid], want[valid], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("name", BUILDS)
def test_boundaries_of_flattened_batches(name: str, positions: bool) -> None:
    """As transformers' collator makes them. Models whose positions count from the start of the row need positions."""
    model, lengths = hf.enable(BUILDS[name]()), _lengths()
    ids = torch.randint(1, models.VOCABULARY, (1, WIDTH))
    texts = [{"input_ids": part[0].tolist()} for part in ids.split(lengths, 1)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=positions)
    call = collate(texts, return_tensors="pt")
    call.pop("labels")
    if not positions and name in ("bert", "gpt2"):
        with pytest.raises(UnsupportedError, match="cannot run packed sequences"):
            _out(model, call)
        return
    want = _alone(model, {"input_ids": ids}, [lengths])
    torch.testing.assert_close(_out(model, call), want, atol=2e-5, rtol=1e-5)
    padded = torch.tensor([[1] * (WIDTH - lengths[-1]) + [0] * lengths[-1]])
    valid = padded.bool()
    torch.testing.assert_close(_out(model, call | {"attention_mask": padded})[valid], want[valid], atol=2e-5, rtol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_compiled_boundaries_of_flattened_batches(name: str) -> None:
    """Compiled code computes documents from boundaries, also of other numbers of sequences, and checks them."""
    torch.compiler.reset()
    model = hf.enable(BUILDS[name]()).requires_grad_()
    compiled = torch.compile(model, backend="aot_eager")

    def call_of(lengths: list[int], shared: bool) -> dict[str, Any]:
        call = _call([lengths], "none")
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        ends_of_keys = ends if shared else ends.clone()
        return call | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends_of_keys, "max_length_q": 9, "max_length_k": 9}

    for lengths, shared in (([5, 19], True), ([7, 7, 10], False), ([10, 3, 4, 7], False), ([9, 15], True)):
        call = call_of(lengths, shared)
        outs, gradients = [], []
        for trained in (compiled, model):
            model.zero_grad()
            outs.append(trained(**call, use_cache=False)[0])
            outs[-1].square().sum().backward()
            gradients.append([torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()])
        torch.testing.assert_close(*outs, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(outs[0], _alone(model, call, [lengths]), atol=2e-5, rtol=1e-5)
    padded = call | {"attention_mask": torch.tensor([[1] * 20 + [0] * 4])}
    with torch.no_grad():
        torch.testing.assert_close(_out(compiled, padded)[:, :20], _out(model, padded)[:, :20], atol=2e-5, rtol=1e-5)
        for wrong in ([0, 9, 23], [0, 25, 24], [1, 9, 24]):
            ends = torch.tensor(wrong, dtype=torch.int32)
            with pytest.raises(RuntimeError, match="are not boundaries"):
                _out(compiled, call | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends})
        with pytest.raises(RuntimeError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
            _out(compiled, call | {"cu_seq_lens_k": torch.tensor([0, 8, 24], dtype=torch.int32)})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mask", ["none", "ones", "padding"])
@pytest.mark.parametrize("name", BUILDS)
def test_compiled_code_keeps_them_apart(name: str, mask: str) -> None:
    """It cannot look at positions, so one graph serves packed rows and others."""
    torch.compiler.reset()
    model = hf.enable(BUILDS[name]())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for rows in ([_lengths()], [_lengths()], [[WIDTH - 5, 5]]):
        call = _call(rows, mask)
        want = _alone(model, call, rows)
        valid = call.get("attention_mask", torch.ones(1, WIDTH)).bool()
        torch.testing.assert_close(_out(compiled, call)[valid], want[valid], atol=2e-5, rtol=1e-5)


def _attention_calls(graphs: list[torch.fx.GraphModule]) -> list[torch.fx.Node]:
    return [n for graph in graphs for n in graph.graph.nodes if "attention.default" in str(n.target)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sparse", [None, "window", "dilated"])
@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled_training_reads_documents(name: str, mask: str, sparse: str | None, backend: str) -> None:
    """Gradients are those of eager code, one graph serves all batches, and no tensor has a value for each score."""
    torch.compiler.reset()
    model = hf.enable(BUILDS[name]()).requires_grad_()
    if sparse is not None:
        hf.sparsify(model, masks.sliding_window(4) if sparse == "window" else masks.dilated_window(8, 8, dilation=2))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(4):
        call = _call([_lengths(), _lengths()], mask)
        valid = call.get("attention_mask", torch.ones(2, WIDTH)).bool()
        outs, gradients = [], []
        for trained in (compiled, model):
            model.zero_grad()
            outs.append(trained(**call, use_cache=False)[0][valid])
            outs[-1].backward(torch.arange(outs[-1].numel()).sin().view_as(outs[-1]))
            gradients.append([torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()])
        torch.testing.assert_close(*outs, atol=2e-5, rtol=1e-5)
        for found, want in zip(*gradients, strict=True):
            torch.testing.assert_close(found, want, atol=1e-4 * float(want.abs().max()) + 2e-5, rtol=1e-3)
    calls = _attention_calls(counter.graphs)
    assert len(calls) == model.config.num_hidden_layers
    assert all(node.args[3].startswith("<documents>") and node.args[4] is None for node in calls)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, where it reads a graph's inputs
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("build", [models.llama, models.mistral])
def test_compiled_training_with_graph_breaks_and_checkpoints(build: Callable[[], Any], mask: str) -> None:
    """What one graph makes of positions, code outside of it and later graphs read."""
    torch.compiler.reset()
    model = hf.enable(build()).train()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="aot_eager")
    for checkpointed in (False, True):
        models.checkpoint_activations(model, checkpointed)
        for _ in range(2):
            call = _call([_lengths()], mask)
            valid = call.get("attention_mask", torch.ones(1, WIDTH)).bool()
            gradients = []
            for trained in (compiled, model):
                model.zero_grad()
                trained(**call, use_cache=False)[0][valid].square().sum().backward()
                gradients.append([x.grad for x in model.parameters()])
            for found, want in zip(*gradients, strict=True):
                torch.testing.assert_close(found, want, atol=1e-4 * float(want.abs().max()) + 2e-5, rtol=1e-3)


def test_whole_cuda_graphs_read_no_documents() -> None:
    """They cannot read on the host, so a tensor keeps sequences apart there, until the model is optimized anew."""
    model, call = models.llama(), _call([[9, 15]], "none")
    want = _alone(model, call, [[9, 15]])
    for options, handle in (({"cuda_graphs": "whole"}, "causal()"), ({}, "<documents>; causal()")):
        torch.compiler.reset()
        stof.optimize(model, store=False, pack=False, **options)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        torch.testing.assert_close(_out(compiled, call), want, atol=2e-5, rtol=1e-5)
        assert {node.args[3] for node in _attention_calls(counter.graphs)} == {handle}


def test_exported_models_read_no_documents() -> None:
    model, call = hf.enable(models.bert()), _call([[9, 15]], "padding")
    with torch.no_grad():
        program = torch.export.export(model, (), kwargs=call, strict=False)
    assert not any("ids_on_host" in str(node.target) for node in program.graph.nodes)
    other = _call([[4, 20]], "padding")
    valid = other["attention_mask"].bool()
    torch.testing.assert_close(program.module()(**other)[0][valid], _out(model, other)[valid], atol=2e-5, rtol=1e-5)


def test_positions_of_padded_batches_begin_no_sequence() -> None:
    """They stand still at padding, wherever it is."""
    for model in (hf.enable(models.bert()), hf.enable(models.llama())):
        for valid in (models.batch("left")["attention_mask"], (torch.rand(3, WIDTH) < 0.6).long()):
            ids = torch.randint(1, models.VOCABULARY, valid.shape)
            positions = (valid.cumsum(1) - 1).clamp(min=0)
            assert not sequence_numbers(positions, valid.bool()).any()
            assert not sequence_numbers(positions.masked_fill(valid == 0, 1), valid.bool()).any()
            call = {"input_ids": ids, "attention_mask": valid, "position_ids": positions}
            want = hf.disable(model)(**call)[0]
            kept = valid.bool()
            torch.testing.assert_close(_out(hf.enable(model), call)[kept], want[kept], atol=2e-5, rtol=1e-5)


def test_generation_goes_on_from_a_cache() -> None:
    model, inputs = hf.enable(models.llama()), models.batch("left", (12, 7))
    got = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    want = hf.disable(model).generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want)


def test_packed_positions_and_a_cache_are_refused() -> None:
    model, call = hf.enable(models.llama()), _call([[10, WIDTH - 10]], "ones")
    with torch.no_grad():
        cache = model(call["input_ids"]).past_key_values
    del call["attention_mask"]
    with pytest.raises(UnsupportedError, match="leave the cache out"):
        _out(model, call | {"past_key_values": cache})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["LFM2", "Qwen3-Next"])
@pytest.mark.parametrize("mask", ["none", "ones"])
def test_other_layers_over_tokens_are_refused(name: str, mask: str) -> None:
    model = hf.enable(REFUSED[name]())
    packed, plain = _call([[10, WIDTH - 10]], mask), _call([[WIDTH]], mask)
    with pytest.raises(UnsupportedError, match="no position_ids that begin anew"):
        _out(model, packed)
    want = _out(model, plain)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(_out(compiled, plain), want)
    with pytest.raises(UnsupportedError, match="no position_ids that begin anew"):
        _out(compiled, packed)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=traced("leave position_ids out, or do not compile")):
        _out(torch.compile(model, backend="eager", fullgraph=True), plain)


def _qwen_vl() -> Any:
    config = transformers.Qwen2_5_VLTextConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    )  # fmt: skip
    return transformers.Qwen2_5_VLTextModel(config).eval()


@pytest.mark.parametrize("mask", ["none", "ones", "padding"])
@pytest.mark.parametrize("kinds", [3, 4])
def test_positions_of_several_kinds(kinds: int, mask: str) -> None:
    model = hf.enable(_qwen_vl())
    rows = [_lengths() for _ in range(random.randint(1, 2))]
    call = _call(rows, mask)
    want = _alone(model, call, rows)
    call["position_ids"] = call["position_ids"].expand(kinds, -1, -1)
    valid = call.get("attention_mask", torch.ones(len(rows), WIDTH)).bool()
    for more in ({}, {"use_cache": False}):
        torch.testing.assert_close(_out(model, call | more)[valid], want[valid], atol=2e-5, rtol=1e-5)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(_out(compiled, call)[valid], want[valid], atol=2e-5, rtol=1e-5)


def _text_and_grids(parts: int) -> Tensor:
    """Positions `[3, S]` of texts and grids of images or videos in turn, as Qwen2.5-VL numbers them."""
    out, start = [], 0
    for _ in range(parts):
        length = random.randint(1, 5)
        out.append(torch.arange(start, start + length).expand(3, -1))
        start += length
        sizes = [torch.arange(random.randint(1, 4)) for _ in range(3)]
        sizes[0] = (sizes[0] * random.choice([0.4, 1.0, 3.0])).long()  # several frames may have the same time
        out.append(torch.stack([x.flatten() for x in torch.meshgrid(*sizes, indexing="ij")]) + start)
        start = int(out[-1].max()) + 1
    return torch.cat(out, 1)


def test_grids_begin_no_sequence_and_their_sequences_are_told_apart() -> None:
    for _ in range(200):
        rows = [_text_and_grids(random.randint(1, 3)) for _ in range(random.randint(1, 3))]
        if random.random() < 0.3:
            rows.append(torch.arange(random.randint(1, 4)).expand(3, -1))
        lengths = [row.shape[1] for row in rows]
        positions, want = torch.cat(rows, 1)[:, None], torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
        valid = torch.ones(1, sum(lengths), dtype=torch.bool)
        assert torch.equal(sequence_numbers(positions, valid)[0], want)
        text = torch.cat([torch.arange(length) for length in lengths])[None, None]
        assert torch.equal(sequence_numbers(torch.cat([text, positions]), valid)[0], want)
        padding = torch.zeros(3, 1, 4, dtype=torch.long)
        padded = torch.cat([padding, positions, padding], 2)
        numbers = sequence_numbers(padded, torch.nn.functional.pad(valid, (4, 4)))
        assert torch.equal(numbers[0, 4:-4], want)


def _by_instance(model: Any) -> Any:
    before = model.model.forward
    model.model.forward = lambda *args, **kwargs: before(*args, **kwargs)
    return model


def _by_class(model: Any) -> Any:
    kind = type(model.model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    model.model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _outer(model: Any) -> Any:
    before = model.forward
    model.forward = lambda ids, **kwargs: before(ids, **kwargs)
    return model


@pytest.mark.parametrize("wrap", [_by_instance, _by_class, _outer])
@pytest.mark.parametrize("enable_first", [False, True])
def test_wrapped_forwards(wrap: Callable[[Any], Any], enable_first: bool) -> None:
    rows = [_lengths(), _lengths()]
    call = _call(rows, "ones")
    model = models.llama()
    want = _alone(model, call, rows)
    model = wrap(hf.enable(model)) if enable_first else hf.enable(wrap(model))
    ids = call.pop("input_ids")
    with torch.no_grad():
        got = model(ids, **call).logits
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
        if wrap is not _outer:
            hidden = model.model(ids, call["attention_mask"], call["position_ids"])[0]
            torch.testing.assert_close(model.lm_head(hidden), want, atol=2e-5, rtol=1e-5)


def test_arguments_that_nobody_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = transformers.LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return before(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    model, rows = models.llama(), [_lengths()]
    call = _call(rows, "ones")
    want = _alone(model, call, rows)
    hf.enable(model)
    torch.testing.assert_close(_out(model, call), want, atol=2e-5, rtol=1e-5)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="does not name its arguments"):
        model.model(*call.values())


@pytest.mark.parametrize(("build", "compiled"), [(models.bert, False), (models.llama, False), (models.llama, True)])
def test_masks_that_number_sequences_are_refused(build: Callable[[], Any], compiled: bool) -> None:
    """LLaMA-Factory packs so; read as padding, the numbers would let sequences see one another."""
    torch.compiler.reset()
    model = hf.enable(build())
    if compiled:
        model = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(1, models.VOCABULARY, (2, WIDTH))
    numbers = torch.ones_like(ids)
    want = _out(model, {"input_ids": ids, "attention_mask": numbers.bool()})
    torch.testing.assert_close(_out(model, {"input_ids": ids, "attention_mask": numbers}), want)
    numbers[1, 9:] = 2
    with pytest.raises(RuntimeError if compiled else UnsupportedError, match=r"attention_mask.*values above 1"):
        _out(model, {"input_ids": ids, "attention_mask": numbers})

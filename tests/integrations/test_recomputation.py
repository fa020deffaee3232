"""Activation checkpointing recomputes layers under the sparse masks of their calls, or raises an error."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from stof import masks
from stof.errors import UnsupportedError
from stof.masks import Mask
from stof.runtime.recomputation import Changes
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")

# Reentrant checkpointing warns of calls without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
SPARSE: list[Mask | dict[int, Mask] | None] = [
    None,
    masks.sliding_window(1),
    masks.sliding_window(5),
    {0: masks.sliding_window(2)},
    {1: masks.sliding_window(3)},
]
LENGTH, LAYERS = 8, 2
CHANGED = r"call backward\(\) before the mask changes"


def make() -> Any:
    return copy.deepcopy(_made())


@functools.cache
def _made() -> Any:
    torch.manual_seed(0)
    model = models.llama(num_hidden_layers=LAYERS, attention_dropout=0.0).double().train()
    model.config.use_cache = False
    return hf.enable(model)


def loss_of(model: Any, embeds: Tensor) -> Tensor:
    logits: Tensor = model(inputs_embeds=embeds, use_cache=False).logits
    return (logits * torch.linspace(-1, 1, models.VOCABULARY, dtype=torch.float64)).sin().sum()


def gradients_of(model: nn.Module, embeds: Tensor, loss: Tensor) -> list[Tensor | None]:
    tensors = [embeds, *model.parameters()]
    for x in tensors:
        x.grad = None
    loss.backward()
    return [None if x.grad is None else x.grad.clone() for x in tensors]


class Drawn:
    """A model with parts that are frozen, checkpointed in some way, and its copy without checkpointing."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.plain, self.model = make(), make()
        self.needs_gradient = draw.random() < 0.5
        frozen = [draw.random() < 0.5 for _ in range(LAYERS)]
        attention_alone = draw.random() < 0.3
        for model in (self.plain, self.model):
            for layer, freeze in zip(model.model.layers, frozen, strict=True):
                (layer.self_attn if attention_alone else layer).requires_grad_(not freeze)
        self.reentrant = draw.random() < 0.4
        self.options = {} if self.reentrant else {"determinism_check": draw.choice(["default", "none"])}
        self.scope = draw.choice(["layers", "model", "both"])
        if self.scope != "model":
            # Reentrant checkpointing gives gradients to what requires them before it.
            self.needs_gradient = self.needs_gradient or self.reentrant
            kwargs = {"use_reentrant": self.reentrant}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        elif self.reentrant:
            self.needs_gradient = True
        self.changes = 0

    def set_masks(self) -> None:
        mask = self.draw.choice(SPARSE)
        for model in (self.plain, self.model):
            hf.sparsify(model, mask)
        self.changes += 1

    def call(self) -> tuple[Tensor, Tensor, int, list[Tensor | None]]:
        """The loss of a call, whose gradients are known from the model without checkpointing."""
        ids = torch.randint(1, models.VOCABULARY, (1, LENGTH))
        embeds = self.plain.get_input_embeddings()(ids).detach().requires_grad_(self.needs_gradient)
        with torch.random.fork_rng():
            expected = gradients_of(self.plain, embeds, loss_of(self.plain, embeds))
        if self.scope == "layers":
            loss = loss_of(self.model, embeds)
        else:

            def run(x: Tensor) -> Tensor:
                return loss_of(self.model, x)

            loss = checkpoint(run, embeds, use_reentrant=self.reentrant, **self.options)
        return loss, embeds, self.changes, expected


def check_case(seed: int) -> tuple[int, int]:
    """How many backward passes of a random script were right, and how many were refused."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    case, pending, right, refused = Drawn(draw), [], 0, 0
    for event in draw.choices(["mask", "call", "with", "backward", "evaluate", "drop"], [3, 4, 2, 4, 1, 1], k=10):
        if event == "mask":
            case.set_masks()
        elif event == "call":
            pending.append(case.call())
        elif event == "with":
            mask = draw.choice(SPARSE)
            case.changes += 1
            with hf.sparsify(case.plain, mask), hf.sparsify(case.model, mask):
                pending.append(case.call())
            case.changes += 1
        elif event == "evaluate":
            with torch.no_grad():
                loss_of(case.model, torch.randn(1, LENGTH, 32, dtype=torch.float64))
        elif event == "drop" and pending:
            pending.pop(draw.randrange(len(pending)))
        elif event == "backward" and pending:
            loss, embeds, changes, expected = pending.pop(draw.randrange(len(pending)))
            try:
                got = gradients_of(case.model, embeds, loss)
            except UnsupportedError:
                assert changes != case.changes, f"seed {seed}: no mask changed"
                refused += 1
                continue
            right += 1
            for one, other in zip(got, expected, strict=True):
                assert (one is None) == (other is None), seed
                if one is not None and other is not None:
                    scale = other.abs().max().clamp(min=1.0)
                    torch.testing.assert_close(one / scale, other / scale, atol=1e-9, rtol=1e-7, msg=f"seed {seed}")
    return right, refused


# PyTorch 2.11 closes the generator of a refused recomputation after its hooks are gone, and Python reports that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_scripts_are_right_or_refused(count: int) -> None:
    outcomes = [check_case(seed) for seed in range(count)]
    right, refused = (sum(column) for column in zip(*outcomes, strict=True))
    assert right > count // 2
    assert refused > count // 4


def ids_and_mask() -> tuple[Tensor, Mask]:
    return torch.randint(1, models.VOCABULARY, (1, LENGTH)), masks.sliding_window(int(torch.randint(1, 5, ())))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("scope", ["layers", "model"])
def test_training_loops(scope: str, use_reentrant: bool) -> None:
    """Another mask in each step, calls for evaluation before the backward pass, and several calls under one mask."""
    model, plain = make(), make()

    def call(ids: Tensor) -> Tensor:
        embeds = model.get_input_embeddings()(ids)
        run: Callable[[Tensor], Tensor] = lambda x: loss_of(model, x)  # noqa: E731
        return checkpoint(run, embeds, use_reentrant=use_reentrant) if scope == "model" else run(embeds)

    if scope == "layers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for _ in range(3):
        ids, mask = ids_and_mask()
        with hf.sparsify(model, mask), hf.sparsify(plain, mask):
            losses = [call(ids), call(ids.flip(1))]
            with torch.no_grad():
                call(ids)
            for each in (model, plain):
                each.zero_grad()
            sum(losses).backward()  # type: ignore[union-attr]
            loss = sum(loss_of(plain, plain.get_input_embeddings()(x)) for x in (ids, ids.flip(1)))
            loss.backward()  # type: ignore[union-attr]
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    with hf.sparsify(model, mask):
        late = call(ids)
    with pytest.raises(UnsupportedError, match=CHANGED):
        late.backward()


def test_frozen_layers_are_not_recomputed_under_the_masks_of_other_calls() -> None:
    """Their outputs have no graph; a mask that is set again counts as another one."""
    model, (ids, mask) = make(), ids_and_mask()
    model.model.layers[0].requires_grad_(False)
    embeds = model.get_input_embeddings()(ids).detach()
    hf.sparsify(model, {0: mask})
    loss = checkpoint(lambda x: loss_of(model, x), embeds, use_reentrant=False)
    hf.sparsify(model, {0: masks.sliding_window(7)})
    kept = loss_of(model, embeds.clone().requires_grad_())
    with pytest.raises(UnsupportedError, match=CHANGED):
        loss.backward()
    hf.sparsify(model, {0: mask})
    with pytest.raises(UnsupportedError, match=CHANGED):
        loss.backward()
    del kept


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "after"])
def test_masks_may_not_change_in_a_checkpointed_function(where: str, use_reentrant: bool) -> None:
    model, (ids, mask) = make(), ids_and_mask()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    changes = itertools.cycle([mask, None])

    def run(x: Tensor) -> Tensor:
        if where == "around":
            with hf.sparsify(model, mask):
                return loss_of(model, x)
        loss = loss_of(model, x)
        hf.sparsify(model, next(changes))
        return loss.sin()

    loss = checkpoint(run, embeds, use_reentrant=use_reentrant)
    with pytest.raises(UnsupportedError, match=f"{CHANGED}|before the masks change"):
        loss.backward()
    loss_of(model, embeds).backward()


def test_calls_of_other_threads() -> None:
    """Threads number their nodes apart, and identifiers of threads that ended are used again."""
    model, (ids, mask) = make(), ids_and_mask()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    losses: list[Tensor] = []

    def call() -> None:
        for _ in range(50):
            embeds.sin()  # later numbers than those of other threads
        hf.sparsify(model, mask)
        losses.append(checkpoint(lambda x: loss_of(model, x), embeds, use_reentrant=False))

    def change() -> None:
        hf.sparsify(model, masks.sliding_window(7))
        loss_of(model, embeds)

    for target in (call, change):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    with pytest.raises(UnsupportedError, match="several threads"):
        losses.pop().backward()

    other, loss = make(), None
    hf.sparsify(other, mask)
    thread = threading.Thread(target=lambda: losses.append(loss_of(other, embeds)))
    thread.start()
    thread.join()
    loss = checkpoint(lambda x: loss_of(other, x), embeds, use_reentrant=False)
    loss.backward()  # the mask was set before the first call, so any thread may recompute


def test_copies_have_calls_of_their_own() -> None:
    model, (ids, mask) = make(), ids_and_mask()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss_of(model, embeds).backward()
    hf.sparsify(model, mask)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    changes = "_stof_sparse_mask_changes"
    assert getattr(copied.model.layers[0].self_attn, changes) is not getattr(model.model.layers[0].self_attn, changes)
    checkpoint(lambda x: loss_of(copied, x), embeds, use_reentrant=False).backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd_does_not_say_which_node_runs() -> None:
    changes, x, answers = Changes(), torch.randn(3, requires_grad=True), []

    def call(x: Tensor) -> Tensor:
        answers.append(changes.note_call())
        return x.sin().exp()

    for change in (False, True):
        out = checkpoint(call, x, use_reentrant=False).sum()
        assert not change or changes.note_change()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            out.backward()
    assert answers == [True, True, True, False]

"""Trains what a case says with STOF, and in float64 with dense attention and nothing around it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import stof
import stof.integrations.transformers as stof_hf
from stof import masks
from tests.fuzz.run import Outcome, of_block_mask, place, refusal_within
from tests.fuzz.training import Case, Step
from tests.fuzz.training_models import (
    VOCABULARY,
    Attend,
    Stack,
    attend_densely,
    attention_layers,
    dense_attention,
    transformer,
)

# Largest relative error in float32. Under autocast it is three times the largest of dense attention in the same case,
# if that is more: STOF's is about the same, and was at most twice as large in 312 cases.
_TOLERANCE = 1e-3


def run_case(case: Case, device: str = "cpu") -> Outcome:
    del device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stof.plan_cache.clear()
        expected = _Training(case, dense_attention, plain=True).run()
        tolerance = _TOLERANCE
        if case.autocast:
            around = dict.fromkeys(("wrapped", "compiled"), "") | {"checkpointing": "none", "offloaded": False}
            rounded = _Training(dataclasses.replace(case, **around), dense_attention).run()
            tolerance = max(tolerance, 3 * max(_errors(case, rounded, expected).values()))
        why, error = _difference(case, stof.attention, expected, tolerance)
        if not why:
            return Outcome()
        refusal = refusal_within(error)
        if error is not None and (isinstance(error, CheckpointError) or _of_torch(case, error)):
            refusal = type(error).__name__
        if error is not None and of_block_mask(error):
            refusal = f"PyTorch's create_block_mask: {type(error).__name__}"
        if refusal:
            return Outcome(refused=f"{refusal}, {re.sub('[0-9]+', 'N', str(error))[:90]!r}")
        if _difference(case, dense_attention, expected, tolerance)[0]:
            return Outcome(refused="dense attention in its place fails too")
    verdict = "WRONG" if error is None else "CRASH"
    command = f"python -m tests.fuzz --training --seed {case.seed} --case {case.number}"
    return Outcome(failure=f"# {verdict}, {case.entry}: {why}\n# {command}\n")


def _of_torch(case: Case, error: Exception) -> bool:
    """Whether PyTorch refuses the case: T5 adds in place to what a policy saved, or code was compiled anew."""
    text = str(error)
    return "has been mutated" in text or (bool(case.compiled) and "not found in storage" in text)


def _difference(
    case: Case, attend: Attend, expected: dict[str, Tensor], tolerance: float
) -> tuple[str, Exception | None]:
    """What is wrong, and the error if there is one."""
    try:
        found = _Training(case, attend).run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}\n{place(error)}", error
    finally:
        if case.compiled:
            torch._dynamo.reset()
    for name, error in _errors(case, found, expected).items():
        if not error <= tolerance:
            return f"{name} has a relative error of {error:.2g}, above {tolerance:.2g}", None
    return "", None


def _errors(case: Case, found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of results and gradients."""
    largest = max(float(x.norm()) for name, x in expected.items() if not name.startswith("tokens"))
    floor, errors = 0.1 if case.autocast else 1e-2, {}
    for name, wanted in expected.items():
        # Some gradients are 0 but for rounding, which is that of the largest.
        scale = max(float(wanted.norm()), floor * largest)
        errors[name] = float((found[name].double() - wanted).norm()) / scale
    return errors


class _Training:
    """The case once; `plain` is without checkpointing, wrappers, compilation and autocast, in float64."""

    def __init__(self, case: Case, attend: Attend, plain: bool = False) -> None:
        self.case, self.attend, self.plain = case, attend, plain
        self.space: dict[str, Any] = {"torch": torch, "stof": stof, "masks": masks, "np": np, "device": "cpu"}
        torch.manual_seed(case.seed)
        self.model: Any
        if case.model == "plain":
            options = case.options | {"dropout_p": case.dropout}
            self.model = Stack(attend, case.kv_heads, options, case.scaled)
            self.blocks, embedding = list(self.model.blocks), self.model.embed
        else:
            self.model = transformer(case.model, case.dropout)
            self.blocks = [
                x for x in self.model.modules() if re.search("(DecoderLayer|BertLayer|T5Block)$", type(x).__name__)
            ]
            embedding = self.model.get_input_embeddings()
        self.layers = list(attention_layers(self.model).values())
        for part in [embedding, *self.blocks][: case.frozen]:
            part.requires_grad_(False)
        if plain or case.model == "t5":  # whose ReLUs turn differences of rounding into other gradients
            self.model.double()
        if case.wrapped_first and not plain:
            self._wrap()
        if case.model != "plain":
            stof_hf.enable(self.model) if attend is stof.attention else attend_densely(self.model)
        if not plain:
            if not case.wrapped_first:
                self._wrap()
            for part in self._parts(case.compiles) if case.compiled else []:
                part.compile(backend=case.compiled)
            self._checkpoint()

    def _parts(self, which: str) -> list[Any]:
        model = self.model if self.case.model == "plain" else self.model.base_model
        return {"": [], "block": self.blocks, "attention": self.layers or self.blocks, "model": [model]}[which]

    def _wrap(self) -> None:
        for part in self._parts(self.case.wrapped):
            part.forward = _wrapped(part.forward, self.case.wrapper)

    def _checkpoint(self) -> None:
        case = self.case
        if case.checkpointing == "none":
            return
        options: dict[str, Any] = {"use_reentrant": case.checkpointing == "reentrant"}
        if case.checkpointing == "selective":
            options["context_fn"] = functools.partial(_contexts, case)
        if case.around in ("block", "both"):
            if case.model == "plain":
                self.model.call = functools.partial(checkpoint, **options)
            else:
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
                self.model.enable_input_require_grads()
        if case.around in ("model", "both"):
            call, anchor = self.call, torch.ones(1, requires_grad=True)  # a reentrant region needs such an argument
            self.call = lambda inputs: checkpoint(lambda _: call(inputs), anchor, **options)  # type: ignore[method-assign]

    def call(self, inputs: dict[str, Any]) -> Tensor:
        out = self.model(**inputs)
        return out if isinstance(out, Tensor) else out.logits if "logits" in out else out.last_hidden_state

    def run(self) -> dict[str, Tensor]:
        """Results of the forward passes, and gradients of the backward passes."""
        results: dict[str, Tensor] = {}
        losses: dict[int, Tensor] = {}
        with (
            set_checkpoint_early_stop(self.case.early_stop),
            torch._functorch.config.patch(dict(self.case.partitioner)),
        ):
            for at, action in enumerate(self.case.order.split()):
                what, numbers = action[0], [int(digit) for digit in action[1:]]
                if what == "E":
                    with torch.no_grad():
                        results[f"tokens of {action} at {at}"] = self._forward(numbers[0])[0]
                elif what == "F":
                    tokens, losses[numbers[0]] = self._forward(numbers[0])
                    results[f"tokens of {action} at {at}"] = tokens.detach()
                else:
                    torch.stack([losses[number] for number in numbers]).sum().backward(retain_graph=what == "R")
                    for name, parameter in self.model.named_parameters():
                        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                        results[f"{name} of {action} at {at}"] = gradient.detach()
                    self.model.zero_grad()
        return results

    def _forward(self, number: int) -> tuple[Tensor, Tensor]:
        case, step = self.case, self.case.steps[number]
        if self.attend is stof.attention:
            exec("\n".join(step.lines), self.space)
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, VOCABULARY, (case.batch, step.length), generator=generator)
        keep = None if step.keep is None else torch.from_numpy(np.array(step.keep))
        with contextlib.ExitStack() as stack:
            if case.model == "plain":
                valid = torch.ones_like(ids, dtype=torch.bool)
                inputs = {"ids": ids, "mask": self.space.get("mask", keep)}
            else:
                inputs, valid = self._batch(step, ids)
                layers = range(len(self.layers)) if step.layer is None else [step.layer]
                if self.attend is stof.attention:
                    sparse = stof_hf.sparsify(self.model, dict.fromkeys(layers, self.space["mask"]))
                    stack.callback(sparse.remove if case.removed else lambda: None)
                else:
                    inputs["kept_scores"] = {self.layers[n]: keep for n in layers}
            if case.autocast and not self.plain:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if case.offloaded and not self.plain:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x))
            torch.manual_seed(number)
            tokens = self.call(inputs)[valid].double()
        weights = torch.randn(tokens.shape, generator=generator, dtype=torch.float64)
        return tokens, (tokens * weights).sum()

    def _batch(self, step: Step, ids: Tensor) -> tuple[dict[str, Any], Tensor]:
        """A model's inputs, and which tokens count."""
        batches, position = self.case.batches, torch.arange(step.length).expand(ids.shape)
        valid = torch.ones_like(ids, dtype=torch.bool)
        inputs: dict[str, Any] = {"input_ids": ids}
        if step.soft:
            inputs = {"inputs_embeds": self.model.get_input_embeddings()(ids).detach().requires_grad_()}
        if self.case.model != "bert":
            inputs["use_cache"] = False
        if self.case.model == "t5":
            inputs["decoder_input_ids"] = ids
        if batches in ("packed", "ones"):
            begins = torch.tensor([0, *step.padded])
            inputs["position_ids"] = position - begins[torch.searchsorted(begins, position, right=True) - 1]
            if batches == "ones" and self.attend is stof.attention:  # transformers finds sequences only without a mask
                inputs["attention_mask"] = torch.ones_like(ids)
        elif batches != "none":
            padded = torch.tensor(step.padded)[:, None]
            valid = position >= padded if batches == "left" else position < step.length - padded
            inputs["attention_mask"] = valid.long()
        return inputs, valid


def _wrapped(forward: Callable[..., Any], style: str) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return functools.wraps(forward)(wrapper) if style == "wraps" else wrapper


def _contexts(case: Case) -> Any:
    calls = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if case.saved.isdisjoint(operator._schema.name.split("::")):
            return CheckpointPolicy.PREFER_RECOMPUTE
        calls[context.is_recompute] += 1
        saved = calls[context.is_recompute] % case.every == 0
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

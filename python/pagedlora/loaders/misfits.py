"""Adapters that are for another model than the one that is served: words for the error."""

from __future__ import annotations

from pagedlora.errors import AdapterFormatError
from pagedlora.loaders.fused_modules import last_part
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.stored import StoredTensor, tensor_error
from pagedlora.shown import quoted


class MisfitError(Exception):
    """A tensor that the model has no place for; becomes an `AdapterFormatError` by `named`."""

    def __init__(self, tensor: StoredTensor, problem: str, way_out: str = "") -> None:
        """Says what is wrong.

        Args:
            tensor: Of the adapter.
            problem: What it is instead of what it should be.
            way_out: What to do if this is the model that the adapter was trained on; empty: it
                cannot be.
        """
        super().__init__(problem)
        self._tensor = tensor
        self._problem = problem
        self._way_out = way_out

    def named(self, path: str, base_model: str) -> AdapterFormatError:
        """The error that a caller meets.

        Args:
            path: Of the adapter.
            base_model: What it was trained on; "" if it does not say.
        """
        trained_on = f", {quoted(base_model)}" if base_model else ""
        way_out = f"; serve the model that it was trained on{trained_on}"
        if self._way_out:
            way_out += f"{',' if trained_on else ''} or {self._way_out}"
        return tensor_error(path, self._tensor.name, self._problem + way_out)


def missing_module(
    name: str, raw: str, tensor: StoredTensor, table: ModuleTable, path: str
) -> MisfitError | AdapterFormatError:
    """Why there is no module for one of an adapter's.

    Args:
        name: What the file calls it, without what savers put around it.
        raw: The same with that.
        tensor: One of the module's.
        table: The model's modules; has none of that name.
        path: Names the adapter.
    """
    belongs = f"belongs to module {quoted(name)}, which"
    found = table.base_modules(raw, name)
    if found is None:
        return MisfitError(
            tensor,
            f"{belongs} the model does not have or which is not among its LoRA target modules",
            _target(name),
        )
    if not found:
        return MisfitError(tensor, f"{belongs} the model does not have")
    if not all(map(table.can_carry_lora, found)):
        problem = "can carry no LoRA in this model: linear modules, Conv1D and embeddings can"
        return MisfitError(tensor, f"{belongs} {problem}")
    is_itself = len(found) == 1 and last_part(found[0]) == last_part(name)
    has = "has" if is_itself else f"has as {' and '.join(map(quoted, found))}"
    return tensor_error(
        path,
        tensor.name,
        f"{belongs} the model {has}, but not among its LoRA target modules: {_target(*found)}",
    )


def _target(*modules: str) -> str:
    """How to make modules targets."""
    lasts = "".join(f', "{last_part(module):.80}"' for module in modules)
    return f'name the module, lora_target_modules=["all-linear"{lasts}]'

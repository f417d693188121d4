"""From roles that a forward pass shows to named blocks, in the order of the model."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from curvoscope.blocks import LAYER_ROLES, Blocks, Piece, flat, layer_and_role
from curvoscope.families.adapters import Adapter, with_adapters
from curvoscope.families.assembly import AFTER, BEFORE, END, LAYERS, STAGES, Assembly, Family
from curvoscope.families.roles import RoleTable
from curvoscope.families.stacks import common_path


def assemble_recognised(
    model: nn.Module, found: RoleTable, adapters: Sequence[Adapter], recurrences: Sequence[Family] = ()
) -> Blocks:
    """The blocks of a model whose roles are known from a forward pass, those of `recurrences` from their tables."""
    return with_adapters(_RecognisedAssembly(model, adapters).recognised(found, recurrences), adapters)


class _RecognisedAssembly(Assembly):
    """Claims the parameters that have roles, then those that tables know, then the rest."""

    def recognised(self, found: RoleTable, recurrences: Sequence[Family]) -> Blocks:
        """The roles that were found, recurrent layers by their tables, then the rest, with notes."""
        members = {home: [self._bare[name] for name in names] for home, names in found.layer_parameters.items()}
        begin = {home: min(self._position[name] for name in names) for home, names in members.items()}
        paths = {home: common_path([name.split(".")[:-1] for name in names]) for home, names in members.items()}
        order = {role: i for i, role in enumerate(LAYER_ROLES)}
        for name in sorted(found.roles, key=lambda one: order.get((layer_and_role(one) or ("", ""))[1], len(order))):
            role, home = found.roles[name], found.homes.get(name)
            self._claimed |= {self._bare[piece.parameter] for piece in role.pieces}
            block = role.block(name, self._block(*role.pieces).tied)
            first = min(self._position[self._bare[piece.parameter]] for piece in role.pieces)
            stage = _stage(name.removeprefix(found.fronts.get(name, "")))
            self._add(name, block, (stage, first) if home is None else (LAYERS, begin[home]))
        recurrent = self._add_layers(recurrences)
        if not found.roles:  # no other layers, around which things could stand
            self._add_outside(recurrent)
        start = min([*begin.values(), *(self._begin(layer.path) for layer in recurrent)], default=0)
        for name, parameter in self._parameters.items():
            if name in self._claimed:
                continue
            actual, position = self._actual[name], self._position[name]
            piece = Piece.whole(actual, parameter.shape, flat(parameter.ndim))
            inside = (one for one, path in paths.items() if path and name.split(".")[: len(path)] == path)
            home = next(inside, None)
            place = (BEFORE if position < start else AFTER, position) if home is None else (LAYERS, begin[home])
            block = replace(self._block(piece), note=found.notes.get(actual, ""))
            self._add(f"{actual} (parameter)" if actual in self._blocks else actual, block, place)
        return self._sorted()


def _stage(name: str) -> int:
    return END if name.startswith("head.") else STAGES.get(name, BEFORE)

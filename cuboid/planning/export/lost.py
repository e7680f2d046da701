"""What a target has no key for: refused in one sentence that names all of it, or noted at the head of the file."""

from dataclasses import dataclass
from typing import Any

from cuboid.errors import UserError
from cuboid.spec.model import ModelSpec


@dataclass(frozen=True)
class Note:
    """A field that the target has in its own way, whatever the plan says; the work of a step is the same."""

    field: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.field}={self.there} (planned: {self.here})"


def noted(notes: list[Note]) -> str:
    """Notes as a comment at the head of a file."""
    return "".join(f"# Otherwise there: {note}\n" for note in notes)


def router_notes(model: ModelSpec) -> list[Note]:
    """Noise on a router's logits, and a bound of each sequence's assignments, are Cuboid's own."""
    if model.mixture is None:
        return []
    named = [("mixture.router_noise", model.mixture.router_noise, 0.0)]
    named.append(("mixture.capacity_factor", model.mixture.capacity_factor, 0.0))
    return [Note(*entry) for entry in named if entry[1] != entry[2]]


class Lost:
    """Keys of a plan that a target cannot express."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.found: list[str] = []

    def unless(self, works: bool, key: str, value: object, instead: str) -> None:
        """Notes that the key is lost unless the condition holds."""
        if not works:
            shown = str(value).lower() if isinstance(value, bool) else value
            self.found.append(f"{key}={shown} ({instead})")

    def refuse(self) -> None:
        """Raises when anything was lost."""
        if self.found:
            again = not all(each.startswith(("model", "mixture")) for each in self.found)  # what no layout mends
            raise UserError(
                f"{self.target} has no key for {', '.join(self.found)}{'; plan again with --fix' if again else ''}"
            )

"""What a target has no key for, collected so that one sentence names all of it."""

from cuboid.errors import UserError


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
            raise UserError(f"{self.target} has no key for {', '.join(self.found)}; plan again with --fix")

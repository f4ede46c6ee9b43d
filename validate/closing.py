"""This module is what holds something until it is closed, as every `with` block is to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Used as a context manager, it is closed at the end, whatever happened."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; closing twice does nothing."""

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

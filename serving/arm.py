"""Arms of a sweep: which context layouts are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loha.layout import format_k
from loha.rendering import View


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One context layout."""

    view: View
    """full for K=inf, where every view is the same."""
    k: int | None
    polling: int

    @property
    def name(self) -> str:
        """Return a short name, unique within a sweep."""
        return "full" if self.view == "full" else f"{self.view}:k{format_k(self.k)}p{self.polling}"

    def request(self) -> dict[str, Any]:
        """Return the `loha` object of a request."""
        return {"k": format_k(None) if self.k is None else self.k, "polling": self.polling, "view": self.view}


def grid(views: Iterable[View], ks: Iterable[int | None], pollings: Iterable[int]) -> list[Arm]:
    """Return every combination once; K=inf is full text in every view and at every P."""
    arms: dict[str, Arm] = {}
    pollings = list(pollings)
    ks = list(ks)
    for view in views:
        for polling in pollings:
            for k in ks:
                whole = k is None or view == "full"
                arm = Arm(view="full", k=None, polling=1) if whole else Arm(view=view, k=k, polling=polling)
                arms.setdefault(arm.name, arm)
    return list(arms.values())

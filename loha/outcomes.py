"""Which instances a set of runs solved, from the report of an evaluation.

Source: swebench 5.0.2's summary report: a JSON object with lists of instance ids, `resolved_ids` among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from loha.errors import LohaError

_NOT_RESOLVED = ("unresolved_ids", "error_ids", "empty_patch_ids", "incomplete_ids", "completed_ids", "submitted_ids")


def read_outcomes(path: Path) -> dict[str, bool]:
    """Return instance id -> solved for every instance that the report names.

    Args:
        path: a swebench report, or a JSON object of instance id -> true/false.

    Raises:
        LohaError: when the file is missing or of another form.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LohaError(f"{path}: cannot read the outcomes ({error.strerror})") from error
    except ValueError as error:
        raise LohaError(f"{path}: not JSON ({error}); expected a swebench report with resolved_ids") from error
    if isinstance(report, Mapping) and isinstance(report.get("resolved_ids"), list):
        failed = [name for key in _NOT_RESOLVED for name in report.get(key) or ()]
        return {**dict.fromkeys(failed, False), **dict.fromkeys(report["resolved_ids"], True)}
    if isinstance(report, Mapping) and report and all(isinstance(value, bool) for value in report.values()):
        return dict(report)
    raise LohaError(f"{path}: no resolved_ids; expected a swebench report, or an object of instance id -> true/false")

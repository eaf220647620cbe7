"""Loading of a calibration table, with a check of the strategies and parameters of its stages."""

from __future__ import annotations

from pathlib import Path

from reasoner.confidence.calibration import Calibration, CalibrationError, read_calibration
from reasoner.strategies.registry import parse_params


def load_calibration(path: Path) -> Calibration:
    """Read the table in ``path`` and check the strategies of its stages.

    Raises ``CalibrationError``, naming the file and the field, for a file that cannot be used.
    """
    table = read_calibration(path)
    for index, difficulty_bin in enumerate(table.bins):
        for stage in difficulty_bin.stages:
            try:
                parse_params(stage.name, stage.params)
            except ValueError as error:
                raise CalibrationError(f"calibration {path}: bins.{index}.stages: {error}") from None
    return table

"""Chart of a calibration: reliability of its probabilities, and tokens and accuracy by difficulty."""

from __future__ import annotations

from pathlib import Path

from reasoner.confidence.calibration import Bin, Calibration


def draw_calibration(table: Calibration, path: Path) -> None:
    """Write a PNG with the reliability diagram (areas are weights), and tokens and accuracy of each bin."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    held = table.reliability
    left.plot([0, 1], [0, 1], color="#777777", linewidth=1)
    left.scatter(
        [mean for mean, _, _ in held.bins],
        [share for _, share, _ in held.bins],
        s=[20 + 600 * weight for _, _, weight in held.bins],
        color="#0072B2",
        alpha=0.7,
    )
    left.set_xlabel("probability that an answer is right, predicted")
    left.set_ylabel("share that was right")
    left.set_title(f"problems that were not fitted: ECE {held.ece:.3f}, Brier {held.brier:.3f}", fontsize=10)
    edges = [0.0, *(part.below for part in table.bins)]
    names = [
        f"{low:g} to {high:g}\n{part.problems} problems\n" + ("\n".join(_abbreviate_stages(part)) or "stop")
        for low, high, part in zip(edges, edges[1:], table.bins, strict=False)
    ]
    right.bar(names, [part.tokens for part in table.bins], color="#E69F00")
    right.set_ylabel("tokens a problem, with probe and verifier")
    right.set_xlabel("probability that the answer is right after the probe, and what is done then")
    right.tick_params(axis="x", labelsize=7)
    solved = right.twinx()
    solved.plot(names, [part.accuracy for part in table.bins], "o", color="#009E73")
    solved.set_ylim(0, 1)
    solved.yaxis.set_major_formatter(PercentFormatter(1.0))
    solved.set_ylabel("problems solved (dots)")
    models = " and ".join(model.id for model in (table.policy, table.verifier) if model is not None)
    figure.suptitle(f"{', '.join(table.suites)}: {table.problems} problems, {models}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _abbreviate_stages(part: Bin) -> list[str]:
    return [f"{stage.name} {stage.params.get('n', '')}" for stage in part.stages]

r"""Delay distributions that are fitted to the measured tasks of each device.

OrthoFL simulates each device with a distribution that has the mean and the standard deviation of the device's measured
task times. The duration of each simulated task is drawn from this distribution (OrthoFL §5.1 and D.4).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manifoldagg._validation import check_choice, check_instance, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.delays import Delay, Exponential, Gaussian, HalfNormal, LogNormal, Uniform
from manifoldagg.simulation.measurements import read_measurements

__all__ = ["FAMILIES", "PerTask", "fit_profiles"]

FAMILIES: Mapping[str, Callable[[np.ndarray], Delay]] = {
    "gaussian": Gaussian.fit,
    "lognormal": LogNormal.fit,
    "halfnormal": HalfNormal.fit,
    "uniform": Uniform.fit,
    "exponential": Exponential.fit,
}
"""The functions that fit a distribution to measured delays, by the name of the family."""


@dataclass(frozen=True)
class PerTask(Delay):
    """A delay of a whole task that does not depend on the work of the task.

    Args:
        delay: the distribution of the seconds of a task.

    Source: OrthoFL §5.1, where a device has one distribution for each data set and model.

    Example:
        >>> delay = PerTask(Uniform(1.0, 3.0))
        >>> delay.expected(work=50.0), delay.quantile(0.25)
        (2.0, 1.5)
    """

    delay: Delay

    def __post_init__(self) -> None:
        check_instance("delay", self.delay, Delay, "a Delay")

    def expected(self, work: float = 1.0) -> float:
        return self.delay.expected()

    def draw(self, generator: np.random.Generator, work: float = 1.0) -> float:
        return self.delay.draw(generator)

    def mean_of_unit(self) -> float:
        return self.delay.expected()

    def inverse_cdf(self, probability: float) -> float:
        return self.delay.quantile(probability)


def fit_profiles(
    path: Path | str, family: str, *, work: float = 1.0, size_ratio: float = 1.0, per_task: bool = False
) -> dict[str, Delay]:
    r"""Fit one distribution to the measured tasks of each device in a CSV file.

    Let $t_i$ be the computation time and $c_i$ the communication time of task $i$ of a device. The delay of this task
    for one unit of work is

    $$x_i = (t_i + \operatorname{size\_ratio} \cdot c_i) / \operatorname{work}.$$

    With the default options, $x_i$ equals the time in the column `round_s`. Each device has its own parameters:

    | `family` | distribution | parameters from the delays $x_i$ of the device |
    | --- | --- | --- |
    | `gaussian` | [`Gaussian`][manifoldagg.simulation.Gaussian] | mean and standard deviation, then truncation at 0 |
    | `lognormal` | [`LogNormal`][manifoldagg.simulation.LogNormal] | mean and standard deviation of the delays |
    | `halfnormal` | [`HalfNormal`][manifoldagg.simulation.HalfNormal] | mean |
    | `uniform` | [`Uniform`][manifoldagg.simulation.Uniform] | 5th and 95th percentile |
    | `exponential` | [`Exponential`][manifoldagg.simulation.Exponential] | mean |

    The method `fit` of each class states the formulas. Standard deviations have the divisor n. If a device has a single
    measurement, its standard deviation is 0. Its Gaussian, log-normal and uniform delays are therefore constant.

    Args:
        path: the path of a CSV file, as for [`Empirical.from_csv`][manifoldagg.simulation.Empirical.from_csv].
        family: the name of the family of distributions.
        work: the number of units of work per measured task.
        size_ratio: the bytes of the simulated model divided by the bytes of the measured model.
        per_task: whether the delay is independent of the work of a task. It is otherwise proportional to the work.

    Returns:
        The distribution of each device, in the order of the first lines of the devices.

    Raises:
        ArgumentError: if an argument or the file is invalid, or if a device has no distribution of the family. The
            message names the device.

    Source: OrthoFL §5.1 for Gaussian delays, and D.4 for the others.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "delays.csv")
        ...     _ = path.write_text("client,computation_s,round_s\npi,1.0,2.0\npi,3.0,6.0\nphone,0.5,0.75\n")
        ...     fit_profiles(path, "gaussian")
        {'pi': Gaussian(location=4.0, scale=2.0), 'phone': Gaussian(location=0.75, scale=0.0)}
    """
    check_choice("family", family, FAMILIES)
    check_number("work", work, above=0)
    check_number("size_ratio", size_ratio, at_least=0)
    check_instance("per_task", per_task, bool, "True or False")
    profiles: dict[str, Delay] = {}
    for device, tasks in read_measurements(path).items():
        try:
            fitted = FAMILIES[family](np.array([(t + size_ratio * c) / work for t, c in tasks]))
        except ArgumentError as error:
            raise ArgumentError(f"path: {path}, client {device}: {family}: {error}") from None
        profiles[device] = PerTask(fitted) if per_task else fitted
    return profiles

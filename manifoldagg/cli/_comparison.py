"""The comparison that the options of `manifoldagg compare` describe, on the command line or in a file."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import workloads
from manifoldagg.experiments.compare import comparison_settings, method_settings
from manifoldagg.experiments.datasets import load_dataset
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.report import read_report
from manifoldagg.experiments.tuning import Tuning, tuning_seeds, with_rate
from manifoldagg.experiments.weight_averaging import WeightAveraging
from manifoldagg.simulation.dataset import LabelledDataset
from manifoldagg.simulation.metadata import stable_repr, versions
from manifoldagg.simulation.method import Method

SETTINGS = (
    *("partition", "holdout", "validation", "batch", "target"),
    *("scheduler", "delays", "availability", "task_cost", "concurrency", "eval_every"),
)
OPTIONAL_SETTINGS = ("duration", "buffer", "refill", "averaging", "eval_starts")
"""Settings that change the name of a folder only if they are given."""


@dataclass(frozen=True)
class PlannedComparison:
    """A comparison that `manifoldagg compare` can run.

    Attributes:
        options: the options of the command by name.
        methods: the methods.
        scaled_rates: a line of text for each default rate that was scaled.
        tuning: the search for the rates of the methods, or `None`.
    """

    options: Mapping[str, Any]
    methods: list[Method]
    scaled_rates: list[str]
    tuning: Tuning | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "PlannedComparison":
        """Build the comparison that the options of the command describe.

        Raises:
            ArgumentError: if the methods, the rates, the name or the tuning seeds are invalid.
        """
        methods, scaled_rates = methods_with_scaled_rates(
            options["methods"],
            options["rate"] or [],
            **{name: options[name] for name in ("clients", "concurrency", "buffer")},
        )
        name = options["name"]
        if name is not None and (os.sep in name or name in ("", ".", "..")):
            raise ArgumentError(f"name: expected the name of a folder in --out, got {name!r}")
        tuning = None
        if options["tune"]:
            used = range(options["first_seed"], options["first_seed"] + options["seeds"])
            seeds = tuning_seeds(used, check_count("tune-seeds", options["tune_seeds"]))
            tuning = Tuning(seeds, length=options["tune_length"], cache=Path(options["out"], ".tuned"))
        return cls(options, methods, scaled_rates, tuning)

    def check_names(self) -> None:
        """Check the names that the comparison itself would resolve after it has loaded the data."""
        workloads.partition(self.options["partition"])
        self._averaging()
        workloads.parse_workload(*(self.options[name] for name in ("scheduler", "delays", "availability")))

    @cached_property
    def dataset(self) -> LabelledDataset:
        """The data set."""
        return load_dataset(*(self.options[name] for name in ("data", "model", "augment")))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The arguments of `compare` that determine the results, except for the size, the methods and the tuning."""
        settings = {name: self.options[name] for name in SETTINGS}
        for name in OPTIONAL_SETTINGS:
            if self.options[name] is not None and self.options[name] is not False:
                settings[name] = self.options[name]
        return settings

    @cached_property
    def folder(self) -> Path:
        """The folder of the report."""
        options = self.options
        if options["name"] is not None:
            return Path(options["out"], options["name"])
        # Options with their default values do not change the name of the folder.
        defaults = {"first_seed": 0, "tune_length": 1.0, "augment": None}
        others = [options[name] for name, default in defaults.items() if options[name] != default]
        seeds = None if self.tuning is None else self.tuning.seeds
        key = (options["data"], options["model"], stable_repr(self.methods), self.settings, seeds, *others)
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:8]
        size = f"{options['clients']}-clients-{options['num_updates']}-updates-{options['seeds']}-seeds"
        return Path(options["out"], f"{self.dataset.name}-{size}-{digest}")

    @property
    def unfinished(self) -> Path:
        """The folder of the progress, which exists while the comparison is unfinished."""
        return self.folder.with_name(f"{self.folder.name}.unfinished")

    def finished_report(self) -> dict[str, Any] | None:
        """Return the report in the folder, or `None` if it has other settings or other versions of the packages."""
        if self.unfinished.exists():
            return None
        try:
            found = read_report(self.folder)
            settings = found["settings"]
            expected = self._expected_settings(settings["tuning"])
            # The settings contain hashes of the files. Other package versions can change the results.
            same_versions = versions().items() <= dict(found["timing"]["versions"]).items()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        same = settings == expected | {"clients_without_samples": settings.get("clients_without_samples")}
        return found if same and same_versions else None

    def _expected_settings(self, search: dict[str, Any] | None) -> dict[str, Any]:
        """Return the settings in the report of this comparison, if these are the results of the search for the rates.

        Raises:
            ValueError: if the search has other settings.
        """
        options = self.options
        tuning = self.tuning
        averaging = self._averaging()
        methods = self.methods
        if averaging is not None:
            methods = averaging.apply(methods, options["num_updates"], range(options["clients"]))
        if tuning is not None and search is not None:
            if (search["seeds"], search.get("length", 1.0)) != ([*tuning.seeds], tuning.length):
                raise ValueError("the search has other settings")
            rates = {name: found["chosen"] for name, found in search["methods"].items() if isinstance(found, dict)}
            methods = [with_rate(one, rates[one.name]) if one.name in rates else one for one in methods]
        seeds = range(options["first_seed"], options["first_seed"] + options["seeds"])
        settings = comparison_settings(self.dataset, {**options, "seeds": seeds, "averaging": averaging})
        return settings | {"tuning": tuning and search, "methods": method_settings(methods)}

    def _averaging(self) -> WeightAveraging | None:
        text = self.options["averaging"]
        return None if text is None else WeightAveraging.parse(text)

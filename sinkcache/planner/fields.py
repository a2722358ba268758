"""The fields of a config file by the names of transformers, and what its class fills in where one is missing."""

from collections.abc import Mapping
from typing import Any

from sinkcache.planner.families import Family

_LARGEST = 2**31 - 1  # the largest int of C: no field that is a size is more


class Fields:
    """The fields of a decoder's config, by the names of transformers; `assumed` tells which of them were not in it."""

    def __init__(self, config: Mapping[str, Any], model_type: str, family: Family) -> None:
        self.config, self.model_type, self.family = config, model_type, family
        self.assumed: dict[str, str] = {}

    def get(self, name: str) -> Any:
        """The value of a field, None if it is null; the default of the class if it is not there."""
        written = self.family.names.get(name, name)
        for each in (written, name):
            if each in self.config:
                return self.config[each]
        value = self.family.defaults.get(name)
        if value is not None:
            self.assumed[name] = f"{written} = {value}, the default of {self.model_type}"
        return value

    def whole(self, name: str, least: int = 1) -> int:
        """A field that must be a whole number; raises ValueError, which names it, if it is none."""
        value = self.get(name)
        written = self.family.names.get(name, name)
        if value is None:
            state = "null" if written in self.config or name in self.config else "missing, and its class has no default"
            raise ValueError(f"config field {written} of {self.model_type} is {state}: give a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"config field {written} must be a whole number, {least} or more, got {value!r}")
        if value > _LARGEST:
            raise ValueError(
                f"config field {written} must be at most {_LARGEST:,}, got a number of {len(str(value))} digits"
            )
        return value

    def indices(self, name: str) -> list[int]:
        """A field that lists layers by their numbers, empty if it is null or missing; raises ValueError for others."""
        given = self.get(name)
        if given is None:
            return []
        written = self.family.names.get(name, name)
        if not isinstance(given, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in given):
            raise ValueError(f"config field {written} must be a list of layers' numbers, got {given!r}")
        number = self.whole("num_hidden_layers")
        if name in self.config and any(not 0 <= each < number for each in given):
            raise ValueError(
                f"config fields contradict: {written} = {given} names layers that {number} layers have not"
            )
        return given

    def derived(self, name: str, value: int, how: str) -> int:
        """A field that is null or missing and that the class computes; noted as assumed."""
        self.assumed[name] = f"{self.family.names.get(name, name)} = {value}, {how}"
        return value

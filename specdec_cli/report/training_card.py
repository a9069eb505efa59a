"""The model card of a trained draft and the recipe that uses it: text for the files beside its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from specdec_cli import __version__
from specdec_cli.lm.files.draft_formats import published_kinds
from specdec_cli.quantities import counted
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.present import yaml_value
from specdec_cli.report.train import evaluations_table

CARD, RECIPE = "README.md", "recipe.yaml"
_PARTS = ("target", "sampling")


@dataclass(frozen=True, slots=True)
class TrainedDraft:
    """A finished run, as its card tells it.

    Args:
        recipe: of the run.
        folder: of the draft, as the user named it.
        document: of the run (`TrainDocument`).
        num_samples: texts that were trained on.
        num_tokens: tokens of their answers.
        num_parameters: of the draft that were trained.
    """

    recipe: Recipe
    folder: Path
    document: Mapping[str, Any]
    num_samples: int
    num_tokens: int
    num_parameters: int

    @property
    def _answers(self) -> str:
        return "the answers given in its data" if self.recipe.train.keep_answers else "the target's own answers"

    def card(self) -> str:
        """The model card in Markdown, with the metadata that model hubs read above it."""
        target, method = str(self.recipe.target.model), self.recipe.train.method
        kind = next((kind for kind in published_kinds() if kind.name == method), None)
        what = "Draft model" if kind is None else " ".join(kind.what.split()[-2:])
        licence = _licence_of(target)
        named = Path(target).name
        tags = ["speculative-decoding", method]
        head = {"base_model": target, "license": licence or "unknown", "tags": tags}
        return "\n".join(
            [
                "---",
                *_yaml(head),
                "---\n",
                f"# {what} for `{named}`\n",
                f"A draft for speculative decoding with `{target}`, trained by `specdec train-draft` "
                f"{__version__} on {self._answers}. The output of the target does not change.\n",
                "```console",
                f'$ specdec generate -r {quote(str(self.folder / RECIPE))} "Hello"',
                f"$ specdec bench -r {quote(str(self.folder / RECIPE))}",
                "```\n",
                *self._acceptance(),
                *self._data(),
                *self._settings(),
                *_licences(target, licence, self.recipe.train.data),
            ]
        )

    def usage_recipe(self) -> str:
        """A recipe that decodes the target with the draft, at the k that acceptance was measured at."""
        target = _changed(self.recipe, "target") | {"model": self.recipe.target.model}
        changed: dict[str, dict[str, Any]] = {"target": target}
        changed["draft"] = {"model": str(self.folder)}
        if (best := self.document["best"]) is not None:
            changed["speculation"] = {"num_speculative_tokens": best["k"]}
        comment = f"# Decodes with the draft that `specdec train-draft` wrote into {self.folder}.\n"
        run = f"# Run it: specdec bench -r {quote(str(self.folder / RECIPE))}\n"
        return comment + run + "\n".join(_sections(changed)) + "\n"

    def _acceptance(self) -> list[str]:
        best = self.document["best"]
        if best is None:
            return ["## Acceptance\n", "It was not measured.\n"]
        held_out = counted(self.recipe.train.num_held_out, "held-out prompt")
        about = (
            f"On {held_out}, k = {best['k']}, temperature {self.recipe.sampling.temperature}. The folder has the draft "
            f"of step {best['step']}. A depth's share counts the steps that accepted the token there and all before "
            "it; the loss is the mean since the row above.\n"
        )
        table = evaluations_table(self.document)
        return [f"## {table.title}\n", *table.markdown(), about]

    def _data(self) -> list[str]:
        settings, document = self.recipe.train, self.document
        answered = "with the answers given there" if settings.keep_answers else "answered by the target"
        return [
            "## Data\n",
            f"- prompts: `{settings.data}`, {answered}",
            f"- samples: {self.num_samples}, with {counted(self.num_tokens, 'token')} of answers",
            f"- steps: {document['num_steps']}, {document['seconds']:.0f} s of training",
            f"- trained parameters: {self.num_parameters}\n",
        ]

    def _settings(self) -> list[str]:
        changed = {part: values for part in _PARTS if (values := _changed(self.recipe, part))}
        train = {key: value for key, value in self.recipe.train.model_dump(mode="json").items() if value is not None}
        content = {**changed, "train": {**train, **self.document["settled"]}}
        return ["## Settings\n", "```yaml", *_sections(content), "```\n"]


def _changed(recipe: Recipe, part: str) -> dict[str, Any]:
    """The values of a section that are not the defaults."""
    section = getattr(recipe, part)
    usual = type(section)().model_dump(mode="json")
    return {key: value for key, value in section.model_dump(mode="json").items() if value != usual[key]}


def _licences(target: str, licence: str | None, data: str | None) -> list[str]:
    stated = f"`{licence}`, by its model card" if licence else "not stated in its folder"
    return [
        "## Licence\n",
        "- draft: fill in `license` above before you publish it",
        f"- target `{target}`: {stated}",
        f"- prompts `{data}`: fill in\n",
    ]


def _licence_of(target: str) -> str | None:
    """The licence in the metadata of a target's model card; None where its folder has none."""
    try:
        text = (Path(target) / CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    head = text.split("---")[1] if text.startswith("---") and text.count("---") > 1 else ""
    match = re.search(r"^license:\s*[\"']?([\w.+-]+)", head, re.MULTILINE)
    return match[1] if match else None


def _yaml(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}: {yaml_value(value)}" for key, value in values.items()]


def _sections(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [line for name, keys in sections.items() for line in (f"{name}:", *(f"  {pair}" for pair in _yaml(keys)))]

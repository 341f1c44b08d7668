"""``mla-convert recipes``: the conversion methods that there are, and what one of them says."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mla_convert.cli._options import JsonOption, QuietOption, VerboseOption


def recipes(
    action: Annotated[Literal["list", "show"], typer.Argument(help="list them, or show one.")] = "list",
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="For show: a recipe's name, or a YAML file.", show_default=False),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List the recipes, or show one as YAML with a comment on each key.

    What show prints can be saved, changed and given to `convert --recipe FILE`."""
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from mla_convert.errors import UsageError
        from mla_convert.recipe import commented, load_recipe, read_recipe, recipe_file, summaries

        if action == "list":
            if name is not None:
                raise UsageError(
                    f"recipes list takes no name, and was given {name}", f"mla-convert recipes show {name}"
                )
            found = summaries()
            out.result({"recipes": list(found)})
            for recipe in found:
                out.line(f"{recipe['name']:<10} {recipe['description']}")
            out.line(f"in {recipe_file('default').parent}; mla-convert recipes show NAME")
            return
        if name is None:
            raise UsageError("recipes show needs a name", "mla-convert recipes list shows what there is")
        file = recipe_file(name)
        said = load_recipe(file).to_dict()
        text = commented(read_recipe(file))
        out.result({"name": said["name"], "file": str(file), "recipe": said, "yaml": text})
        out.write(f"# {file}\n{text}")

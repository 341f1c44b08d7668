"""Write docs/recipes.md and docs/notation.md from the recipes, their schema and the table of names.

python docs/generate_pages.py            write them
python docs/generate_pages.py --check    exit with 1 if a file is not what would be written
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from mla_convert.mla.names import NORMED_TABLE
from mla_convert.mla.names import TABLE as PLAIN_TABLE
from mla_convert.recipe import summaries
from mla_convert.recipe.schema import fields_at, known_keys

DOCS = Path(__file__).resolve().parent

# code -> the paper's symbol and the shape
SYMBOLS = {
    "w_dkv": ("W_DKV", "C D"),
    "w_kr": ("W_KR", "R D"),
    "w_uk": ("W_UK", "H N C"),
    "w_uv": ("W_UV", "H V C"),
    "w_uq": ("W_UQ", "H N Q"),
    "w_qr": ("W_QR", "H R Q"),
    "w_o": ("W_O", "D H V"),
    "w_qa": ("of the norm of queries", "norms K D"),
    "w_kn": ("of the norm of keys", "norms K D"),
}

NOTATION = """\
# Notation

The code has DeepSeek-V2's symbols in lower case. This table is made from the one in `mla/names.py`, by which weights
are written and read.

{weights}

Each `b_...` is the bias of the `w_...` of the same letters, in a tensor `.bias` beside `.weight`. `k_norm_proj`, and
`q_a_proj` with `q_b_proj` instead of `q_proj`, are there only where the source normalises queries and keys.

| symbol | code | |
|---|---|---|
| c^KV | `c_kv` | the latent, cached |
| k^R | `k_rope` | the shared RoPE key, cached |
| q^C, q^R | `q_nope`, `q_rope` | a head's query without and with RoPE |
| W_UKᵀ q^C | `q_latent` | the absorbed query |
| ρ | `constants` | what replaces a rotation on the content path, complex, for each query head and frequency |

Shapes use one alphabet:

| | | | |
|---|---|---|---|
| B | batch | S | query tokens |
| T | cached tokens | D | model width |
| H | query heads | G | KV heads |
| K | head dim of the source | N | dim of a head without RoPE |
| R | RoPE dims | V | value dim |
| C | rank of the latent | Q | rank of queries |
| F | frequencies of a head, K/2 | J | stacked keys and values, 2·G·K |

RoPE dims are in the rotate-half order: R/2 real parts, then R/2 imaginary parts.
"""

RECIPES = """\
# Recipes

A recipe says which variant of each step of [the method](method.md) a conversion takes. `mla-convert recipes` lists
them, and `mla-convert recipes show NAME` prints one with a comment on each key.

{recipes}

## One of your own

Save what `show` prints, change it, and give the file instead of a name. A key that is not known, or a value that does
not fit, is named with the file's line:

```
mla-convert recipes show fast > mine.yaml
mla-convert convert SOURCE OUT --recipe mine.yaml
```

To change single values there need be no file; `conversion.json` records them as part of the recipe:

```
mla-convert convert SOURCE OUT --recipe fast --set factorise.damping=0.2 --set refit.outputs=0.05
```

A value is written as in YAML: `null`, `[0.1, 1]`, `real`. Sections that the recipe has not are made, and
`--set heal=null` takes one out.

## Keys

`name` and `description` come first; `decouple` and `factorise` must be there, the other sections may.

{keys}
"""


def weights() -> Iterator[str]:
    """The table of weights, a row for each symbol."""
    yield "| paper | code | shape | tensor, below `self_attn.` |"
    yield "|---|---|---|---|"
    for code, (paper, shape) in SYMBOLS.items():
        tensors = [name for table in (PLAIN_TABLE, NORMED_TABLE) for name, codes in table.items() if code in codes]
        yield f"| {paper} | `{code}` | {shape} | {', '.join(f'`{name}`' for name in dict.fromkeys(tensors))} |"


def recipes() -> Iterator[str]:
    """The table of recipes."""
    yield "| recipe | calibration tokens | heals | what it does |"
    yield "|---|---|---|---|"
    for recipe in summaries():
        tokens = recipe["calibration_tokens"]
        heals = ", then ".join(recipe["heals"]) or "no"
        yield f"| `{recipe['name']}` | {f'{tokens:,}' if tokens else 'none'} | {heals} | {recipe['description']} |"


def keys() -> Iterator[str]:
    """The table of a recipe's keys."""
    yield "| key | without it | meaning |"
    yield "|---|---|---|"
    for path in known_keys():
        field = fields_at(path[:-1])[path[-1]]
        if len(path) == 1:
            continue
        default = (
            "must be there" if field.is_required() else "`null`" if field.default is None else f"`{field.default}`"
        )
        choices = [found for found in get_args(field.annotation) if isinstance(found, str)]
        meaning = field.description or ""
        shown = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        yield f"| `{'.'.join(path)}` | {default} | {meaning}{shown} |"


def pages() -> dict[Path, str]:
    """Return each page with its text."""
    return {
        DOCS / "notation.md": NOTATION.format(weights="\n".join(weights())),
        DOCS / "recipes.md": RECIPES.format(recipes="\n".join(recipes()), keys="\n".join(keys())),
    }


def main(arguments: list[str]) -> int:
    """Write or check; return the exit code."""
    wrong = 0
    for page, text in pages().items():
        if arguments != ["--check"]:
            page.write_text(text, encoding="utf-8")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"docs/{page.name} is not what the code says: run `make docs`", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``mla-convert report``: write a conversion's report anew."""

from __future__ import annotations

from mla_convert.cli._options import ConvertedArgument, JsonOption, QuietOption, VerboseOption


def report(
    model: ConvertedArgument,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write report.html and report.json into a converted folder.

    Every conversion, healing and recorded evaluation does so by itself: this is for folders of an earlier version.
    """
    from mla_convert.cli._console import screen

    with screen(as_json=json, quiet=quiet, verbose=verbose) as out:
        from mla_convert.report import HTML_NAME, JSON_NAME, write_report

        write_report(model)
        page, data = model / HTML_NAME, model / JSON_NAME
        out.result({"model": str(model), "html": str(page), "json": str(data), "bytes": page.stat().st_size})
        out.line(f"wrote {page} ({page.stat().st_size:,} bytes) and {data}")

"""`gpudiag report DIAGNOSIS.json`: draw a saved diagnosis, with no recording at hand."""

from __future__ import annotations

from pathlib import Path

import click

from gpudiag.commands._common import (
    Outputs,
    example,
    load_diagnosis,
    no_color_option,
    output_options,
    show,
    write_output,
)


@click.command(
    epilog=example(
        "gpudiag report diagnosis.json --html report.html --markdown comment.md",
        "gpudiag report --json-schema diagnosis.schema.json",
    )
)
@click.argument("diagnosis", required=False, type=click.Path(path_type=Path))
@output_options
@click.option("--json-schema", metavar="FILE|-", help="The JSON Schema of the diagnosis format itself.")
@no_color_option
def report(
    diagnosis: Path | None,
    json: str | None,
    html: str | None,
    markdown: str | None,
    sarif: str | None,
    junit: str | None,
    csv: str | None,
    json_schema: str | None,
) -> None:
    """Draw a saved diagnosis (what `--json` wrote, or the bundle of a `profile`); without an option, on the terminal."""
    outputs = Outputs(json=json, html=html, markdown=markdown, sarif=sarif, junit=junit, csv=csv)
    if json_schema is not None:
        from gpudiag.report import schema

        if diagnosis is not None or outputs.given():
            raise click.UsageError("--json-schema stands alone: it says nothing about one diagnosis")
        write_output(json_schema, schema.render().encode())
        return
    if diagnosis is None:
        raise click.UsageError("Missing argument 'DIAGNOSIS'.")
    outputs.check([diagnosis])
    loaded = load_diagnosis(diagnosis)
    outputs.write(loaded)
    if not outputs.given():
        show(loaded, inputs=[str(diagnosis)])

"""The command ``flexmarl export``."""

from pathlib import Path

import click

from ..monitoring.console.echo import echo
from ..run_folder.run_directory import RunDirectory
from .options import FilePath


@click.command()
@click.argument("run_dir", type=FilePath(file_okay=False))
@click.argument("policy")
@click.argument("folder", type=FilePath())
@click.option("--step", type=click.IntRange(0), help="The checkpoint after this step. Default: the newest.")
@click.option(
    "--merged", is_flag=True, help="Of a LoRA policy, write the whole model, with the adapter in its weights."
)
def export(run_dir: Path, policy: str, folder: Path, step: int | None, merged: bool) -> int:
    """Write a policy of a run's checkpoint to FOLDER, for transformers: weights, config and tokenizer.

    The weights are safetensors in float32. The state of the training is left out. FOLDER must not exist, or be empty.
    A LoRA policy is written as an adapter, for peft.

    \b
    Examples:
      flexmarl export runs/first sorter models/sorter
      flexmarl export runs/first sorter models/sorter-100 --step 100
      flexmarl export runs/first sorter models/whole --merged

    \b
    In Python:
      AutoModelForCausalLM.from_pretrained("models/sorter")
      PeftModel.from_pretrained(base, "models/adapter")
    """
    from ..run_folder.export import export as export_policy

    source = export_policy(RunDirectory.existing(run_dir), policy, step, folder, merged=merged)
    echo(f"{folder} holds policy {policy} of {source.parent}")
    return 0

"""The command ``flexmarl completion``."""

import click
from click.shell_completion import get_completion_class

from ..monitoring.console.echo import echo_file


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print a script that completes flexmarl's commands and options in a shell.

    \b
    Examples:
      eval "$(flexmarl completion bash)"                                # in ~/.bashrc
      eval "$(flexmarl completion zsh)"                                 # in ~/.zshrc
      flexmarl completion fish > ~/.config/fish/completions/flexmarl.fish
    """
    completer = get_completion_class(shell)
    assert completer is not None, "click has these three"
    echo_file(completer(context.find_root().command, {}, "flexmarl", "_FLEXMARL_COMPLETE").source() + "\n")
    return 0

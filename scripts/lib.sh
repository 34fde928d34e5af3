# shellcheck shell=bash
# Shared by the scripts of this folder and scripts/bench/run: makes .venv and installs into it.
# Nothing is written outside the checkout: downloads are in .cache/pip, the lock is in .cache. The Hugging Face cache stays
# in its usual place: models that a recipe names by a hub's name are stored there, and the user's token is read there.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# Another folder is for another Python beside .venv: FLEXMARL_VENV=.cache/venv-3.13 PYTHON=python3.13 scripts/test
venv=$(realpath --canonicalize-missing --no-symlinks "${FLEXMARL_VENV:-$root/.venv}")
venv_python=$venv/bin/python
constraints=$root/scripts/constraints.txt

export PIP_CACHE_DIR=$root/.cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# A user's own packages and pip settings must not decide what is installed, or where.
export PYTHONNOUSERSITE=1 PIP_USER=0
unset PYTHONHOME PIP_TARGET PIP_PREFIX

say() { printf '%s\n' "$@" >&2; }

die() {
    say "$@"
    exit 1
}

# install [EXTRA]: installs flexmarl and its requirements, with or without an extra of pyproject.toml. Fast if they are
# installed already. May run several times at once.
install() {
    mkdir -p "$root/.cache"
    (
        flock -n 9 || { say "waiting for another installation into $venv" && flock 9; }
        _install_locked "${1:-}"
    ) 9>"$root/.cache/install-${venv##*/}.lock" # several environments at once
    if _has_gpu && [[ $(_torch_version) == *+cpu ]]; then # for example, made on a login node
        say "note: there is a GPU here, but $venv holds the CPU build of torch: remove it, then it is made again"
    fi
}

_install_locked() {
    local extra=$1 stamp=$venv/installed${1:+-$1} wanted
    # The path is part of the stamp: an editable installation names its checkout, and checkouts get moved.
    wanted=$(cd "$root" && { pwd && cat pyproject.toml scripts/constraints.txt; } | sha256sum)
    _venv_works || _make_venv
    [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && return
    say "installing flexmarl${extra:+ with its $extra tools} into $venv (the first time takes a few minutes)"
    _install_torch
    # The build tool is installed in its pinned version like everything else, not downloaded for each build.
    _pip install hatchling editables
    _pip install --no-build-isolation --editable "$root${extra:+[$extra]}"
    printf '%s\n' "$wanted" >"$venv/installed" # an extra includes all the rest
    printf '%s\n' "$wanted" >"$stamp"
}

# Without these, ctrl-C would end only the current pip, and the next source would be tried.
trap 'exit 130' INT
trap 'exit 143' TERM

_pip() { "$venv_python" -m pip "$1" --quiet --constraint "$constraints" "${@:2}" >&2; }

_venv_works() { "$venv_python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

_make_venv() {
    local python
    python=$(_find_python)
    "$python" -m venv --clear "$venv"
}

# Prints a Python that can make .venv. If no Python can, reports what is missing and exits.
_find_python() {
    local name incomplete='' names=(python3 python3.11 python3.12 python3.13 python3.14 python)
    [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
    for name in "${names[@]}"; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$name"
            return
        fi
        incomplete=${incomplete:-$name}
    done
    if [[ -n $incomplete ]]; then
        local version
        version=$("$incomplete" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "$incomplete (Python $version) has no venv or no ensurepip, which make virtual environments." \
            "On Debian and Ubuntu: sudo apt install python$version-venv"
    fi
    die "flexmarl needs Python 3.11 or newer; none of these is: ${names[*]}" \
        "Install one (Debian, Ubuntu: sudo apt install python3 python3-venv), or set its path: PYTHON=/path/to/python3 $0"
}

# PyPI's torch for x86 brings several GB of CUDA libraries. Without a GPU the CPU build is installed instead: from the
# sources that pip is configured with (a mirror, a folder of wheels), or from PyTorch's own index, which is used for torch
# alone. If neither has it, PyPI's build works too. Only the last attempt prints its errors.
_install_torch() {
    local pin version
    pin=$(grep '^torch==' "$constraints") || return 0 # no pin: constraints.txt was emptied to look for newer versions
    version=${pin#torch==}
    [[ $(_torch_version) == "$version"?(+cpu) ]] && return
    if ! _has_gpu; then
        say "no NVIDIA GPU here: looking for the CPU build of torch $version"
        _pip install "$pin+cpu" 2>/dev/null && return
        _pip install --retries 1 --timeout 15 --no-deps --index-url https://download.pytorch.org/whl/cpu "$pin+cpu" \
            2>/dev/null && return
        say "there is no CPU build for this Python: installing PyPI's build"
    fi
    _pip install "$pin"
}

_torch_version() { "$venv_python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true; }

# FLEXMARL_GPU=1: of the machine that this environment is made for, as an image is.
_has_gpu() { [[ ${FLEXMARL_GPU:-0} == 1 ]] || compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; }

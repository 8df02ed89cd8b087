"""Process of `tests.fuzz` that runs one target under libFuzzer, for a number of inputs or seconds.

    python -m tests.fuzz.engine TARGET FOLDER [options of libFuzzer]

An input that breaks a target is written to FOLDER/findings with the traceback beside it, once for
each failing place in the code, and the fuzzer goes on. If an input ends the process, hangs, or
takes too much memory, libFuzzer writes the input there.
"""

import faulthandler
import hashlib
import shlex
import sys
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["shmserve", "gunicorn.http", "hpack"]):
    from tests.fuzz.targets import LONGEST, TARGETS, WORDS


def place(error: BaseException) -> str:
    """Return a text that is equal for inputs that fail at the same place."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return "\n".join([type(error).__name__, *(f"{one.filename}:{one.lineno}" for one in frames)])


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    target, findings = TARGETS[name], folder / "findings"

    def guarded(data: bytes) -> None:
        try:
            target(data)
        except Exception as ex:
            found = findings / hashlib.sha256(place(ex).encode()).hexdigest()[:12]
            if not found.exists():
                found.write_bytes(data)
                found.with_suffix(".txt").write_text(traceback.format_exc())

    words = folder / "words"
    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in WORDS)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    options = [f"-dict={words}", f"-max_len={LONGEST}", f"-artifact_prefix={findings}/"]
    faulthandler.enable()
    # libFuzzer writes to the first folder.
    folders = [str(folder / "inputs"), *sys.argv[3:]]
    # A merge starts this program again, through a shell.
    again = shlex.join([sys.executable, "-m", "tests.fuzz.engine", name, str(folder)])
    atheris.Setup([again, *folders, *options], guarded)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""The console script and `python -m gpudiag`: an interrupt while modules are still being imported ends quietly, too."""

import os


def run() -> None:
    try:
        from gpudiag.cli import main

        main()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    run()

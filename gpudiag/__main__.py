"""`python -m gpudiag` is the console script."""

from gpudiag.cli import main

if __name__ == "__main__":
    main()

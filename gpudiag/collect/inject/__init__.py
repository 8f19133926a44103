"""What runs inside the user's process: the standard library and the user's own torch only, Python >= 3.8.

Loaded by `bootstrap/sitecustomize.py` under the private name `_gpudiag_inject` (the user's interpreter need not have
gpudiag, nor see anything new on sys.path). Rules for everything in here: never raise into the script, never print,
never leave a frame in its tracebacks, never change what it can observe of its own arguments, streams and exit.
"""

"""Programs that show farcall at work. `farcall demo` lists and runs them.

Each demo is a module that reads as an example (`cartpole.py`). What surrounds an example is shared:
`launch.py` starts and ends its processes, `display.py` shows how it goes, `report.py` writes what
came out. The demos need `pip install "farcall[demos]"`.
"""

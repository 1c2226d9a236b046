"""Programs that show farcall at work. `farcall demo` lists and runs them.

Each demo is a module that reads as an example (`cartpole.py`, `rnn.py`). The code around an example
is shared: `launch.py` starts and ends its processes, `display.py` shows how it goes, `report.py`
writes what came out. Each demo has its own display and report (`cartpole_report.py`), and
`run_cartpole.py` puts it all together. Where workers are killed and come back, `elastic.py` and
`elastic_processes.py` take the place of `launch.py`. The demos need `pip install "farcall[demos]"`.
"""

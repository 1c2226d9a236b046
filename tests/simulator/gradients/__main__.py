"""`python -m simulator.gradients`: see `sim`."""

from simulator.gradients.sim import main

if __name__ == "__main__":
    main()

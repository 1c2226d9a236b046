"""`python -m farcall.testing.gradients`: see `sim`."""

from farcall.testing.gradients.sim import main

if __name__ == "__main__":
    main()

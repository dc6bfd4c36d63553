"""`python -m nemo_gym.cli`: the command `gym` without its console script."""

from nemo_gym.cli.main import main

if __name__ == "__main__":
    main()

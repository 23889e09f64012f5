"""`python -m experiments.lora_mnist`."""

from experiments.lora_mnist.command import main

if __name__ == "__main__":
    raise SystemExit(main())

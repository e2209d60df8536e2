"""``python -m fastattn``: what fastattn finds on this machine, and whether that computes right."""

from fastattn.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())

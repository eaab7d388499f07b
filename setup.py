"""Build script: pyproject.toml holds the metadata."""

from setuptools import setup

setup()

"""Write docs/configuration.md from the configuration's own field texts."""

from pathlib import Path

from osd.config.docs import render

if __name__ == "__main__":
    Path(__file__).parents[1].joinpath("docs", "configuration.md").write_text(render())

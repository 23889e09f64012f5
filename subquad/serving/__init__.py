"""The OpenAI-compatible server: `app.make_app` is its application; all but its limits need the extra `serve`."""

from subquad.serving.config import ServeConfig

__all__ = ["ServeConfig"]

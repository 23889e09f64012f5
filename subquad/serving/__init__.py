"""OpenAI-compatible server; `app.make_app` makes the application. All but `ServeConfig` needs the extra `serve`."""

from subquad.serving.config import ServeConfig

__all__ = ["ServeConfig"]

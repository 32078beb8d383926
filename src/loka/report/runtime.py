"""The JavaScript that draws the charts: Vega, Vega-Lite and vega-embed, as one file that needs no network.

vl-convert carries the library inside its wheel; nothing is downloaded, here or in the reader's browser.
"""

from functools import cache


@cache  # making the bundle takes two seconds
def load_runtime() -> str:
    """The bundle, safe to put between <script> tags."""
    try:
        import vl_convert
    except ImportError as error:
        raise ValueError("the report embeds its charting library; install it: pip install 'loka[report]'") from error
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")

"""The address from which plugins of version 0.1 import `Section`; it lives in `llmsuite.schema.section`."""

from llmsuite.schema.section import Section

__all__ = ["Section"]

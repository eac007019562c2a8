"""Pictures of arrays: matplotlib for papers, plotly for pages. Knows nothing of networks."""

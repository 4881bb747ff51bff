"""HTTP only: routes, schemas, errors, SSE, authentication, tokenising and chat templates."""

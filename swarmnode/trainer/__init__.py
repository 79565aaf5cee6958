"""The trainer process: generate, score, update, evaluate, keep state. It never talks to a peer;
`link/` is how it hears of them."""

"""What tests share: hosts, fakes, attackers, simulated swarms. Fakes for users' own tests are in
`tests.support.fakes`."""

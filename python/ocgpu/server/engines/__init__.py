"""What each kind of upstream needs: routes, Host rule, unload, busy, health."""

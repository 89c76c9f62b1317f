// Exchanges the secret behind the # of the link, which no server and no log ever gets, for a cookie.

const said = document.getElementById("said");
const form = document.getElementById("form");

async function login(secret) {
  const response = await fetch("api/login", { headers: { Authorization: `Bearer ${secret}` } });
  if (response.ok) {
    location.replace("./");
    return;
  }
  said.textContent = "The secret is wrong, or of an earlier start. Take the link that this start printed.";
  form.hidden = false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  login(document.getElementById("token").value.trim().replace(/^(authorization: *)?bearer +/i, ""));
});

const secret = location.hash.slice(1);
history.replaceState(null, "", location.pathname);
if (secret) {
  login(secret);
} else {
  said.textContent = "This page needs the token of the run.";
  form.hidden = false;
}

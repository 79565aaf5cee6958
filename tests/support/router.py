"""A home router as UPnP sees it: an Internet Gateway Device over HTTP on loopback."""

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/event</eventSubURL><SCPDURL>/scpd</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""


class Router:
    """An Internet Gateway Device. mappings: fields of the port forwardings requested."""

    def __init__(self, outside, refuses=False):
        self.mappings = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(DESCRIPTION)

            def do_POST(self):
                asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
                action = re.search(r"#(\w+)", self.headers["SOAPAction"])[1]
                fields = (
                    {"NewExternalIPAddress": outside} if action == "GetExternalIPAddress" else {}
                )
                if action == "GetStatusInfo":
                    fields = {
                        "NewConnectionStatus": "Connected",
                        "NewLastConnectionError": "ERROR_NONE",
                        "NewUptime": "100",
                    }
                if action == "AddPortMapping":
                    router.mappings.append(dict(re.findall(r"<(New\w+)>([^<]*)</", asked)))
                    if refuses:
                        return self.answer(
                            "<errorCode>725</errorCode><errorDescription>OnlyPermanentLeases</errorDescription>",
                            500,
                        )
                inner = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
                return self.answer(
                    "<s:Envelope"
                    f' xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><u:{action}Response'
                    f' xmlns:u="{SERVICE}">{inner}</u:{action}Response></s:Body></s:Envelope>'
                )

            def answer(self, text, code=200):
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/description.xml"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
